"""Tokens and time of each turn of a conversation about a document, and of agents that fork it.

Clients send all turns each time; the service computes those that it does not hold. Measured with the model's own chat
template, and with one that leaves out the first sentence of earlier answers, as templates of reasoning models leave out
their reasoning. Forks of the document continue the conversation after its third turn, each with another question. A
restarted service computes the turns once. Usage, with the folder of a checkpoint that has a chat template, such as that
of `longleaf models fetch smollm2 DIR`:

    python -m bench.conversation DIR --json
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import START_SECONDS
from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta, Finished, Message

REPOSITORY = Path(__file__).parents[1]
BOOK = "book"
QUESTIONS = (
    "Which component streams the tokens?",
    "And which one holds the keys?",
    "How are partial results merged?",
    "What happens when a rank is lost?",
    "Summarize that in one sentence.",
)
OTHER_QUESTIONS = ("What do tenants share?", "Where are snapshots stored?", "Which ports are open?")
CONTENT = "message['content']"
SHORTENED = "(message['content'].split('. ', 1)[-1] if message['role'] == 'assistant' else message['content'])"


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR", help="folder of a checkpoint with a chat template")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--document", type=Path, default=REPOSITORY / "docs" / "architecture.md", metavar="FILE")
    parser.add_argument("--characters", type=int, default=16000, help="length of the document")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    options = parser.parse_args()
    text = options.document.read_text(encoding="utf-8")[: options.characters]
    rows = list[dict[str, object]]()
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        models = {"keeps history": options.model.absolute(), "rewrites history": rewriting(options.model, Path(folder))}
        for template, model in models.items():
            rows += [
                {"template": template} | row for row in measure(model, text, options.tokens, Path(folder, template))
            ]
    result = {"bench": "conversation", "model": options.model.name, "turns": rows, "machine": describe()}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for row in rows:
            print(row)


def rewriting(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose chat template shortens the answers of earlier turns."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    assert CONTENT in template
    (copy / "chat_template.jinja").write_text(template.replace(CONTENT, SHORTENED), encoding="utf-8")
    return copy


def measure(model: Path, text: str, num_tokens: int, data: Path) -> list[dict[str, object]]:
    """One row per turn: five turns, three forks, and the last turn after a restart with one more."""
    rows = list[dict[str, object]]()
    turns = list[Message]()
    with served(model, data) as client:
        client.ingest(BOOK, text)
        for number, question in enumerate(QUESTIONS, 1):
            rows.append({"part": "conversation", "turn": number} | ask(client, BOOK, turns, question, num_tokens))
        for number, question in enumerate(OTHER_QUESTIONS, 1):
            client.fork_context(BOOK, f"agent-{number}")
            row = ask(client, f"agent-{number}", turns[:6], question, num_tokens)
            rows.append({"part": f"fork {number}", "turn": 4} | row)
    with served(model, data) as client:
        turns = turns[:8]
        for number, question in enumerate((QUESTIONS[4], "And in three words?"), 5):
            rows.append({"part": "restarted", "turn": number} | ask(client, BOOK, turns, question, num_tokens))
    return rows


@contextmanager
def served(model: Path, data: Path) -> Iterator[Client]:
    """A client of a service that keeps its contexts in `data`."""
    engine = EngineConfig(model=str(model), max_draft_tokens=0, verify_model=False)
    config = ServiceConfig(engine=engine, data=DataConfig(data_dir=str(data)), port=0, launcher="local")
    with ServiceProcess(coordinator_command(config)) as process, Client(process.wait_ready(START_SECONDS)) as client:
        yield client


def ask(client: Client, context: str, turns: list[Message], question: str, num_tokens: int) -> dict[str, object]:
    """Asks the next question and adds it and its answer to the turns."""
    turns.append(Message("user", question))
    events = list(client.chat(turns, context=context, max_tokens=num_tokens, ignore_end_token=True))
    turns.append(Message("assistant", "".join(event.text for event in events if isinstance(event, Delta))))
    last = events[-1]
    assert isinstance(last, Finished)
    usage = last.usage
    row = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
        "first_token_ms": round(last.timings.first_token_seconds * 1000, 1),
    }
    log(f"{context}: {row}")
    return row


if __name__ == "__main__":
    main()
