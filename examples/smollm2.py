"""Serves SmolLM2, a small chat model, and asks it three questions about this project's README: `make chat`.

    python examples/smollm2.py [--yes]      # --yes: download the model without asking

The model has 135 million parameters. It shows how documents, questions and a chat model fit together, and not how good
answers can be: see docs/user-guide.md for larger models.
"""

import sys
import time
from pathlib import Path

from longleaf.cli.model_option import resolve
from longleaf.client import Client
from longleaf.config import EngineConfig
from longleaf.errors import LongleafError
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.resources import num_processors
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta, Finished

README = Path(__file__).resolve().parents[1] / "README.md"
QUESTIONS = (
    "What is Longleaf, in one sentence?",
    "Which Python version is needed to serve a model?",
    "For which tasks should Longleaf not be used?",
)
MAX_TOKENS = 80
START_SECONDS = 300.0


def main(*arguments: str) -> None:
    model = resolve("smollm2", yes="--yes" in arguments)
    engine = EngineConfig(model=str(model.folder), threads_per_rank=num_processors())
    command = coordinator_command(ServiceConfig(engine=engine, port=0, launcher="local"))
    print("starting the service …", flush=True)
    with (
        ServiceProcess(command) as service,
        Client(service.wait_ready(START_SECONDS), tls_ca="", credential="") as client,
    ):
        began = time.monotonic()
        context = client.ingest("readme", README)
        print(f"read {README.name}: {context.tokens:,} tokens in {time.monotonic() - began:.0f} s, once")
        for question in QUESTIONS:
            ask(client, question)
    print(
        "\nThe answers come from a model of 135 million parameters: they may be wrong, even where the README is clear. "
        "They\nequal those of transformers, token for token. For better answers serve a larger model: "
        "docs/user-guide.md#get-a-model.\n\nNext steps:\n"
        "  longleaf serve --model smollm2 --launcher local --http 8000     # and in another terminal:\n"
        "  longleaf ingest README.md --name readme\n"
        '  longleaf ask readme "What is a rank?"                           # or open http://localhost:8000'
    )


def ask(client: Client, question: str) -> None:
    """Prints the question, and the answer while it is generated."""
    print(f"\n? {question}\n  ", end="")
    for event in client.ask("readme", question, max_tokens=MAX_TOKENS):
        if isinstance(event, Delta):
            print(event.text.replace("\n", "\n  "), end="", flush=True)
        elif isinstance(event, Finished):
            cut = " … (cut off)" if event.reason == "length" else ""
            print(f"{cut}\n  [first token after {event.timings.first_token_seconds:.1f} s]")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except LongleafError as error:
        sys.exit(f"error: {error}")
