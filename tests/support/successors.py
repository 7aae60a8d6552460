"""Services that come after one another and share a journal: real engines, whose ranks answer by arithmetic."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from coordinator.engine.engine import Engine
from coordinator.grammars.compiler import GrammarCompiler
from coordinator.handlers.generation import Generation
from coordinator.handlers.resumable_sessions import CallLater, call_later
from coordinator.persistence.journal.journal import Journal
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.config import EngineConfig
from longleaf.sampling import SamplingParams
from longleaf.types import Delta, Event, Finished, Generate, Resume
from tests.support.fakes.ranks import FakeRanks
from tests.support.running import running
from tests.support.service import load_tokenizer, write_model

VOCAB = 128
"""Single ASCII bytes: each token is one character."""
CONFIG = EngineConfig(model="none", block_size=4, chunk_size=32, replicate_below=8, max_sequences=8, max_waiting=8)


class Served:
    """One of the services."""

    def __init__(self, engine: Engine, ranks: FakeRanks, generation: Generation, journal: Journal) -> None:
        self.engine, self.ranks, self.generation, self.journal = engine, ranks, generation, journal

    async def read(self, request: Generate | Resume, count: int = 10**6) -> list[Event]:
        """The first `count` events, as of a client whose stream breaks then."""
        found: list[Event] = []
        async with aclosing(self.generation.run(request)) as events:
            while len(found) < count and (event := await anext(events, None)) is not None:
                found.append(event)
        return found


@asynccontextmanager
async def serving(
    folder: Path,
    tokenizer: Tokenizer,
    ranks: FakeRanks | None = None,
    config: EngineConfig = CONFIG,
    later: CallLater = call_later,
    wall_clock: Callable[[], float] = time.time,
    grammars: GrammarCompiler | None = None,
) -> AsyncGenerator[Served, None]:
    """A service that has replayed the journal in `folder`."""
    ranks = ranks or FakeRanks(num_blocks=1024, vocab=VOCAB)
    engine, threads, journal = Engine(ranks, config, max_positions=4096), TokenizerPool(), Journal(folder)
    try:
        async with running(engine):
            generation = Generation(
                engine, tokenizer, threads, later=later, journal=journal, wall_clock=wall_clock, grammars=grammars
            )
            await generation.resume_all()
            yield Served(engine, ranks, generation, journal)
    finally:
        await threads.close()


def tokenizer_of(folder: Path) -> Tokenizer:
    return load_tokenizer(write_model(folder))


def asked(
    sampling: SamplingParams, num_samples: int = 1, context: str | None = None, text: str = "a question"
) -> Generate:
    return Generate(
        input=text,
        context=context,
        sampling=sampling,
        num_samples=num_samples,
        use_chat_template=False if context is None else None,
        request_id="one",
        resume_seconds=60.0,
    )


def num_tokens(events: Sequence[Event]) -> int:
    """The number of tokens after which a client that has seen these events resumes."""
    return sum(len(event.token_ids) for event in events if isinstance(event, Delta))


def whole(events: Sequence[Event], sample: int = 0) -> tuple[list[int], str, list[object], list[tuple[str, str, int]]]:
    """Ids, text, logprobs and end of one sample. Its indices are 0, 1, 2 and so on, each once; a client that reconnects
    may get the end a second time, with other times.
    """
    deltas = [event for event in events if isinstance(event, Delta) and event.sample == sample]
    ids: list[int] = []
    for delta in deltas:
        assert delta.index == len(ids)
        ids += delta.token_ids
    ends = [event for event in events if isinstance(event, Finished) and event.sample == sample]
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    return (
        ids,
        "".join(delta.text for delta in deltas),
        list(logprobs),
        list(dict.fromkeys((end.reason, end.matched_stop, end.usage.completion_tokens) for end in ends)),
    )
