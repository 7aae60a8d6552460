"""Ingests a text file once, then asks it questions.

    longleaf serve --model MODEL_FOLDER --world-size 2      # in another terminal
    python examples/ask.py BOOK.txt "Who is the captain?" "What is the ship called?"

The server is taken from LONGLEAF_SERVER, else localhost:50051.
"""

import sys
from pathlib import Path

from longleaf.client import Client
from longleaf.errors import LongleafError
from longleaf.types import Delta, Finished


def main(file: str, *questions: str) -> None:
    with Client() as client:
        context = client.ingest("example", Path(file))
        print(f"{context.tokens} tokens on {len(context.shares)} ranks")
        try:
            for question in questions:
                answer(client, question)
        finally:
            client.delete_context("example")


def answer(client: Client, question: str) -> None:
    """Prints an answer while it is generated; the context stays as it is."""
    print(f"\n{question}")
    for event in client.ask("example", question, max_tokens=64):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            print(f"\n[{event.usage.completion_tokens} tokens, {event.usage.cached_tokens} of the prompt were held]")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except LongleafError as error:
        sys.exit(f"error: {error}")
