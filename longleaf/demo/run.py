"""The demo: serves the embedded model, ingests a long document with planted facts, asks for the facts, checks the
answers, and asks again after a restart. Its progress goes to a `Show`.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig, Launcher, embedded_model
from longleaf.demo.facts import Fact, is_correct
from longleaf.demo.haystack import DEFAULT_TOKENS, Haystack, build_haystack, cut, distinct_facts, make_haystack
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.extras import require_extra
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.topology import count_ranks
from longleaf.types import Cluster, Context, Delta, Event, Finished, IngestProgress, Provenance, Source

CONTEXT = "demo"
NUM_FACTS, NUM_ABSENT = 5, 1
MAX_ANSWER_TOKENS = 96
NUM_SPANS = 2
"""Spans per answer: a fact may begin in one and end in the next."""
PASS_ACCURACY = 0.8
MIN_TOKENS = 1000


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the demo. `file` is a text to plant the facts in, instead of the Python library's sources.

    `tokens` None: the whole file, or DEFAULT_TOKENS of the library.
    """

    model: Path | None = None
    world_size: int = 4
    launcher: Launcher = "ray"
    tokens: int | None = None
    seed: int = 0
    file: Path | None = None
    start_timeout: float = 300.0

    def check(self) -> None:
        """Raises InvalidArgument naming the option."""
        if self.world_size < 1:
            raise InvalidArgument("world_size", f"{self.world_size} is less than 1")
        if self.tokens is not None and self.tokens < MIN_TOKENS:
            raise InvalidArgument("tokens", f"{self.tokens:,} is less than {MIN_TOKENS:,}")


class Question(msgspec.Struct, frozen=True):
    """A question with the expected and the given answer."""

    expected: str
    answer: str
    correct: bool
    sources: tuple[Source, ...] = ()
    """Spans that the answer attended to most; empty if no layer of the model attends to all keys."""


class RankPlacement(msgspec.Struct, frozen=True):
    """The process of a rank, and its part of the document."""

    rank: int
    node: str
    pid: int
    tokens: int
    kv_bytes: int


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a second service over the same data folder. Times in seconds."""

    question: Question
    start_s: float
    """Until it was ready."""
    first_token_s: float
    """From the question to the first token, including the reload of the document."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the demo. Times in seconds; medians and totals over the questions."""

    document_tokens: int
    world_size: int
    questions: tuple[Question, ...]
    accuracy: float
    ttft_s: float
    decode_tokens_per_s: float
    ingest_tokens_per_s: float
    ranks: tuple[RankPlacement, ...]
    restart: Restart | None = None

    @property
    def has_passed(self) -> bool:
        is_same = self.restart is None or self.restart.question.answer == self.questions[0].answer
        return self.accuracy >= PASS_ACCURACY and is_same


class Show(Protocol):
    """Output of the demo's progress."""

    def show_message(self, line: str) -> None:
        """Shows a line of progress."""
        ...

    def show_ingest(self, progress: IngestProgress) -> None: ...

    def show_question(self, question: str) -> None: ...

    def show_answer(self, text: str) -> None:
        """Shows the next piece of the answer."""
        ...

    def show_verdict(self, question: Question) -> None:
        """Shows the verdict on a complete answer."""
        ...

    def show_sources(self, client: Client, sources: Sequence[Source]) -> None:
        """Shows the sources of the answer; their text is read from `client`."""
        ...


def run(settings: DemoSettings, show: Show) -> Report:
    """Runs the demo. The service is stopped when this returns or raises.

    Raises StartError if the server is not installed.
    """
    require_extra("server", "longleaf demo")
    settings.check()
    haystack = build(settings)
    size = len(haystack.text.encode())
    source = settings.file or "the Python standard library's sources"
    show.show_message(f"document: {size:,} bytes of {source} with {len(haystack.facts)} facts to find")
    config = EngineConfig(model=str(settings.model or embedded_model()), world_size=settings.world_size)
    with tempfile.TemporaryDirectory(prefix="longleaf-demo-") as data_dir:
        data = DataConfig(data_dir=data_dir)
        command = coordinator_command(ServiceConfig(engine=config, port=0, launcher=settings.launcher, data=data))
        show.show_message(f"starting {count_ranks(settings.world_size)} ({settings.launcher}) …")
        with _serving(command, settings, show) as client:
            report = _examine(client, haystack, show)
        show.show_message("\nstopped the service and its ranks; starting another one over the same data folder …")
        began = time.monotonic()
        with _serving(command, settings, show) as client:
            start_s = time.monotonic() - began
            question, end = _ask(client, haystack.facts[0], show)
    restart = Restart(question=question, start_s=start_s, first_token_s=end.timings.first_token_seconds)
    return msgspec.structs.replace(report, restart=restart)


@contextmanager
def _serving(command: list[str], settings: DemoSettings, show: Show) -> Generator[Client, None, None]:
    """Runs a service during the `with` block, and yields a client."""
    with ServiceProcess(command) as service:
        address = service.wait_ready(settings.start_timeout)
        show.show_message(f"serving on {address}")
        with Client(address, tls_ca="", tls_cert="", tls_key="", credential="") as client:
            yield client


def build(settings: DemoSettings) -> Haystack:
    """The document and its questions. Raises InvalidArgument for a file that is not UTF-8 text."""
    if settings.file is None:
        return make_haystack(settings.seed, settings.tokens or DEFAULT_TOKENS, NUM_FACTS, NUM_ABSENT)
    try:
        text = settings.file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("file", f"{settings.file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument("file", f"{settings.file} is not UTF-8 at byte {error.start}") from error
    if settings.tokens is not None:
        text = cut(text, settings.tokens)
    rng = random.Random(settings.seed)
    return build_haystack(rng, text, distinct_facts(rng, NUM_FACTS), NUM_FACTS, NUM_ABSENT)


def _examine(client: Client, haystack: Haystack, show: Show) -> Report:
    reports: list[IngestProgress] = []

    def on_progress(progress: IngestProgress) -> None:
        reports.append(progress)
        show.show_ingest(progress)

    context = client.ingest(CONTEXT, haystack.text, on_progress=on_progress)
    cluster = client.cluster()
    show.show_message(
        f"ingested {context.tokens:,} tokens; their keys and values stay on {count_ranks(cluster.world_size)}"
    )
    answers = [_ask(client, fact, show) for fact in (*haystack.facts, *haystack.absent)]
    questions = tuple(question for question, _ in answers)
    ends = [end for _, end in answers]
    return Report(
        document_tokens=context.tokens,
        world_size=cluster.world_size,
        questions=questions,
        accuracy=sum(question.correct for question in questions) / len(questions),
        ttft_s=statistics.median(end.timings.first_token_seconds for end in ends),
        decode_tokens_per_s=_decode_speed(ends),
        ingest_tokens_per_s=reports[-1].tokens_per_second,
        ranks=_ranks(context, cluster),
    )


def _ask(client: Client, fact: Fact, show: Show) -> tuple[Question, Finished]:
    show.show_question(fact.question)
    parts: list[str] = []
    with closing(_events(client, fact.question)) as events:
        for event in events:
            if isinstance(event, Delta):
                parts.append(event.text)
                show.show_answer(event.text)
            elif isinstance(event, Finished):
                answer = "".join(parts)
                sources = event.attribution.sources if event.attribution is not None else ()
                question = Question(fact.expected, answer, is_correct(answer, fact), sources)
                show.show_verdict(question)
                show.show_sources(client, sources)
                return question, event
    raise Unavailable("the answer ended before its last event")


def _events(client: Client, question: str) -> Generator[Event, None, None]:
    """An answer with provenance, or without it if the model does not support it."""
    try:
        yield from client.ask(
            CONTEXT, question, max_tokens=MAX_ANSWER_TOKENS, provenance=Provenance(num_spans=NUM_SPANS)
        )
    except InvalidArgument as error:
        if error.field != "provenance":
            raise
        yield from client.ask(CONTEXT, question, max_tokens=MAX_ANSWER_TOKENS)


def _decode_speed(ends: Iterable[Finished]) -> float:
    """Tokens per second after the first one, over all answers."""
    timed = [(end.usage.completion_tokens - 1, end.timings.decode_seconds) for end in ends]
    seconds = sum(seconds for _, seconds in timed)
    return sum(count for count, _ in timed) / seconds if seconds > 0 else 0.0


def _ranks(context: Context, cluster: Cluster) -> tuple[RankPlacement, ...]:
    shares = {share.rank: share for share in context.shares}
    return tuple(
        RankPlacement(worker.rank, worker.node, worker.pid, shares[worker.rank].tokens, shares[worker.rank].kv_bytes)
        for worker in cluster.workers
    )
