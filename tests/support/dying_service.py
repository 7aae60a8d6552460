"""A service in a separate process that answers one request, prints the events of its client, and is killed meanwhile:
`python -m tests.support.dying_service JOURNAL MODEL REQUEST`, the request in base64 of MessagePack.
"""

import asyncio
import sys
from base64 import b64decode, b64encode
from contextlib import aclosing
from pathlib import Path

import msgspec

from longleaf.types import Delta, Generate
from tests.support.successors import serving, tokenizer_of


def encoded(request: Generate) -> str:
    return b64encode(msgspec.msgpack.encode(request)).decode()


async def main(journal: Path, model: Path, request: Generate) -> None:
    """A line of JSON for each delta."""
    async with serving(journal, tokenizer_of(model)) as service, aclosing(service.generation.run(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                print(msgspec.json.encode(event).decode(), flush=True)
                await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(
        main(Path(sys.argv[1]), Path(sys.argv[2]), msgspec.msgpack.decode(b64decode(sys.argv[3]), type=Generate))
    )
