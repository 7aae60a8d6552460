"""The cost of an agent's turns: a synthetic transcript that grows by some hundred tokens per turn.

Each turn sends the whole transcript, as agents do: the model's answer and the result of a tool are added to it. Tokens
are counted against those that no service could avoid: the ones after the longest common prefix of a turn's prompt with
the turn before it and its answer. Changes of the history by the template thus do not count as repeated work. Parts:

    single     one session, with a template that keeps the history and one that shortens earlier answers
    forks      agents that continue the session from its middle, each with another result
    together   eight sessions of an eighth of the length, whose turns alternate
    restarted  the first turns after a restart: prompts are not stored, contexts are
    append     as many new tokens after a held context, without a conversation
    unshared   a turn of a transcript that the service does not know

The random model is small, so that the tokens count, not its speed. Usage:

    python -m bench.agents --json
    python -m bench.agents --tokens 8000 --turns 6
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import START_SECONDS
from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta, Finished, Message
from zoo.checkpoints import make_checkpoint

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ CONTENT }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
UNCHANGED = TEMPLATE.replace("CONTENT", "message.content")
SHORTENED = TEMPLATE.replace(
    "CONTENT", "message.content[8:] if message.role == 'assistant' and not loop.last else message.content"
)
"""Leaves out the beginning of answers, as templates of reasoning models leave out their reasoning."""
NUM_FORKS, NUM_SESSIONS, NUM_APPENDS = 3, 8, 5
READ_AGAIN_TARGET, FIRST_TOKEN_TARGET = 0.01, 1.3


class Session:
    """An agent's transcript. Counts tokens, and the time to the first token of each turn."""

    def __init__(self, client: Client, tokenizer: Any, history: Sequence[Message], num_new: int, seed: int) -> None:
        """`num_new`: tokens by which a turn grows the transcript."""
        self.history = list(history)
        self.rows = list[dict[str, int | float]]()
        self._client = client
        self._tokenizer = tokenizer
        self._num_new = num_new
        self._random = random.Random(seed)
        self._known = list[int]()
        """The last prompt and its answer."""

    def fork(self, client: Client, num_messages: int, seed: int) -> "Session":
        """A session that continues this one after so many messages."""
        found = Session(client, self._tokenizer, self.history[:num_messages], self._num_new, seed)
        found._known = self._known
        return found

    def turn(self, num_tokens: int) -> None:
        """Adds the result of a tool and asks for the next message."""
        self.history.append(Message("user", words(self._random, self._tokenizer, self._num_new - num_tokens)))
        prompt = prompt_ids(self._tokenizer, self.history)
        events = list(self._client.chat(self.history, max_tokens=num_tokens, ignore_end_token=True))
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.usage.prompt_tokens == len(prompt)
        self.history.append(Message("assistant", "".join(event.text for event in events if isinstance(event, Delta))))
        computed, new = len(prompt) - last.usage.cached_tokens, len(prompt) - common(self._known, prompt)
        row = {
            "prompt_tokens": len(prompt),
            "new_tokens": new,
            "read_again": computed - new,
            "first_token_ms": round(1000 * last.timings.first_token_seconds, 1),
        }
        log(f"turn {len(self.rows) + 1}: {row}")
        self.rows.append(row)
        self._known = prompt + [token for event in events if isinstance(event, Delta) for token in event.token_ids]

    def summary(self, first: int = 1) -> dict[str, object]:
        """The sums over turn number `first` and later ones, counted from 0."""
        rows = self.rows[first:]
        prompts = sum(row["prompt_tokens"] for row in rows)
        return {
            "turns": len(rows),
            "longest_prompt": max(row["prompt_tokens"] for row in rows),
            "new_tokens": sum(row["new_tokens"] for row in rows),
            "read_again": sum(row["read_again"] for row in rows),
            "read_again_share": round(sum(row["read_again"] for row in rows) / prompts, 5),
            "first_token_ms": statistics.median(row["first_token_ms"] for row in rows),
        }


def words(source: random.Random, tokenizer: Any, num_tokens: int) -> str:
    """Random words of about so many tokens."""
    text = ""
    while len(ids := tokenizer.encode(text, add_special_tokens=False)) < num_tokens:
        missing = num_tokens - len(ids)
        text += (
            " ".join(f"{source.choice('bdfgklmnprst')}{source.choice('aeiou')}n" for _ in range(missing // 4 + 1)) + " "
        )
    return text


def prompt_ids(tokenizer: Any, history: Sequence[Message]) -> list[int]:
    messages = [{"role": message.role, "content": message.text} for message in history]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--tokens", type=int, default=120_000, help="tokens of the transcript at the first turn")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--growth", type=int, default=500, help="new tokens of each turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    options = parser.parse_args()
    rows = list[dict[str, object]]()
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        for name, template in (("keeps history", UNCHANGED), ("shortens history", SHORTENED)):
            path = Path(folder, name.replace(" ", "-"))
            model = make_checkpoint(
                path / "model",
                "smollm3",
                num_layers=2,
                max_positions=2 * (options.tokens + options.turns * options.growth),
                chat_template=template,
            )
            measured = measure(model, path / "data", options, is_whole=template == UNCHANGED)
            rows += [{"template": name} | row for row in measured]
    result = {"bench": "agents", "rows": rows, "goals": goals(rows), "machine": describe()}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for row in [*rows, *goals(rows)]:
            print(row)


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    found = list[dict[str, object]]()
    for row in rows:
        if "read_again_share" in row:
            name, share = f"read again, {row['template']}, {row['part']}", row["read_again_share"]
            found.append({"name": name, "value": share, "target": READ_AGAIN_TARGET, "met": share <= READ_AGAIN_TARGET})
    times = {row["part"]: row["first_token_ms"] for row in rows if row["template"] == "keeps history"}
    ratio = round(times["single"] / times["append"], 3)
    name = "first token of a turn against a bare append"
    return [*found, {"name": name, "value": ratio, "target": FIRST_TOKEN_TARGET, "met": ratio <= FIRST_TOKEN_TARGET}]


def measure(model: Path, data: Path, options: argparse.Namespace, *, is_whole: bool) -> Iterator[dict[str, object]]:
    """One row per part; only the first part unless `is_whole`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    source = random.Random(0)

    def session(client: Client, num_tokens: int, seed: int) -> Session:
        history = [Message("system", words(source, tokenizer, num_tokens))]
        return Session(client, tokenizer, history, options.growth, seed)

    with served(model, data) as client:
        alone = session(client, options.tokens, 1)
        for _ in range(options.turns):
            alone.turn(options.answer)
        yield {"part": "single", **alone.summary()}
        if not is_whole:
            return
        yield {"part": "unshared", "first_token_ms": alone.rows[0]["first_token_ms"]}
        half = 1 + 2 * (options.turns // 2)
        for number in range(NUM_FORKS):
            fork = alone.fork(client, half, 10 + number)
            fork.turn(options.answer)
            fork.turn(options.answer)
            yield {"part": f"fork {number + 1}", **fork.summary(0)}
        yield append(client, tokenizer, alone, options)
        sessions = [session(client, options.tokens // NUM_SESSIONS, 20 + number) for number in range(NUM_SESSIONS)]
        for _ in range(options.turns):
            for each in sessions:
                each.turn(options.answer)
        for number, each in enumerate(sessions):
            yield {"part": f"together {number + 1}", **each.summary()}
    with served(model, data) as client:
        restarted = alone.fork(client, len(alone.history), 30)
        for _ in range(3):
            restarted.turn(options.answer)
        yield {"part": "restarted", **restarted.summary(0)}


def append(client: Client, tokenizer: Any, alone: Session, options: argparse.Namespace) -> dict[str, object]:
    """Asks with as many new tokens as a turn has, after a context of the same length as the last transcript."""
    ids = prompt_ids(tokenizer, alone.history)
    client.ingest("held", tuple(ids))
    times = list[float]()
    for number in range(NUM_APPENDS):
        text = words(random.Random(40 + number), tokenizer, options.growth)
        new = tokenizer.encode(text, add_special_tokens=False)[: options.growth]
        events = list(client.generate(new, context="held", max_tokens=options.answer, ignore_end_token=True))
        last = events[-1]
        assert isinstance(last, Finished)
        times.append(1000 * last.timings.first_token_seconds)
    client.delete_context("held")
    return {"part": "append", "first_token_ms": round(statistics.median(times), 1)}


@contextmanager
def served(model: Path, data: Path) -> Iterator[Client]:
    """A client of a service that keeps its contexts in `data`."""
    engine = EngineConfig(model=str(model), max_draft_tokens=0, verify_model=False, threads_per_rank=1)
    config = ServiceConfig(engine=engine, data=DataConfig(data_dir=str(data)), port=0, launcher="local")
    with ServiceProcess(coordinator_command(config)) as process, Client(process.wait_ready(START_SECONDS)) as client:
        yield client


if __name__ == "__main__":
    main()
