"""Serves SmolLM2, a small chat model, and asks it three questions about the first section of the README: `make chat`.

    python examples/smollm2.py [--yes]      # --yes: download the model without asking

The model has 135 million parameters, and many of its answers are wrong: each is printed with the passage of the README
to compare. docs/user-guide.md describes how to get a larger model.
"""

import re
import sys
import time
from pathlib import Path

from longleaf.cli.model_option import resolve
from longleaf.cli.provenance_output import CONTROLS
from longleaf.client import Client
from longleaf.config import CHOSEN, EngineConfig
from longleaf.errors import LongleafError
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta, Finished

README = Path(__file__).resolve().parents[1] / "README.md"
NEXT_SECTION = "\n## "
"""Start of the heading after the part that is read: so small a model answers worse about longer texts."""
QUESTIONS = {
    "Which method does Longleaf use?": "The method is Tree Attention.",
    "Where do the keys and values stay?": "Its attention keys and values (the KV cache) stay in memory",
    "What is Longleaf, in one sentence?": "Longleaf serves language models on documents that do not fit on one device.",
}
"""Questions, and the passage of the README with the answer."""
MAX_TOKENS = 48
START_SECONDS = 300.0


def main(*arguments: str) -> None:
    model = resolve("smollm2", yes="--yes" in arguments)
    engine = EngineConfig(model=str(model.folder), world_size=CHOSEN, threads_per_rank=CHOSEN)
    command = coordinator_command(ServiceConfig(engine=engine, port=0))
    print("starting the service …", flush=True)
    with (
        ServiceProcess(command) as service,
        Client(service.wait_ready(START_SECONDS), tls_ca="", credential="") as client,
    ):
        began = time.monotonic()
        context = client.ingest("readme", first_section(README))
        seconds = time.monotonic() - began
        print(f"read the first section of {README.name} once: {context.tokens:,} tokens in {seconds:.1f} s")
        for question, passage in QUESTIONS.items():
            ask(client, question)
            print(f'  README: "{passage}"')
    print(
        "\nA model of 135 million parameters gave these answers. Expect wrong ones and repetitions, even where the\n"
        "text is clear; transformers generates the same answers from this model. A larger model answers better:\n"
        "docs/user-guide.md#get-a-model\n\nNext steps:\n"
        "  longleaf serve --model smollm2 --http 8000     # and in another terminal:\n"
        "  longleaf ingest README.md --name readme\n"
        '  longleaf ask readme "What is a rank?"          # or open http://localhost:8000'
    )


def first_section(path: Path) -> str:
    """The prose before the first heading of a section, without diagram and targets of links."""
    text = path.read_text(encoding="utf-8").partition(NEXT_SECTION)[0]
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"```.*?```\n*", "", text, flags=re.DOTALL)).strip()


def ask(client: Client, question: str) -> None:
    """Prints the question, and the answer while it is generated."""
    print(f"\n? {question}\n  ", end="")
    for event in client.ask("readme", question, max_tokens=MAX_TOKENS):
        if isinstance(event, Delta):
            print(event.text.translate(CONTROLS).replace("\n", "\n  "), end="", flush=True)
        elif isinstance(event, Finished):
            cut = " … (cut off)" if event.reason == "length" else ""
            print(f"{cut}\n  [first token after {event.timings.first_token_seconds:.1f} s]")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except LongleafError as error:
        sys.exit(f"error: {error}")
