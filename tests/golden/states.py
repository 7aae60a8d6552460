"""The states in which a prompt can be when it is asked: all of them must give the same answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import torch

from coordinator.engine.engine import Engine
from coordinator.events import Document, Prompt, Tokens
from longleaf.channel.step import Row
from longleaf.config import EngineConfig
from longleaf.messages import ContextSettings
from longleaf.sampling import Logprobs, Sampling
from tests.golden.conftest import NEW_TOKENS
from tests.threads import Spoil, ThreadRanks
from workers.rank import Rank

Ids = tuple[int, ...]
State = Callable[[Engine, Ids], Awaitable[list[Ids]]]
"""Brings a prompt into its state and asks it; each of the answers must be the golden one."""

CAPACITY = 4096
"""Of contexts: what is scaled by its length is scaled as `generate` scales a whole prompt."""
KEPT = 900
"""Tokens of the prompt that a context holds; the rest is asked."""


@contextlib.asynccontextmanager
async def running(config: EngineConfig, spoil: Spoil | None = None, machines: str = "") -> AsyncIterator[Engine]:
    engine = Engine(ThreadRanks(config, spoil, machines), config, max_positions=8192)
    await engine.start()
    loop = asyncio.create_task(engine.run())
    try:
        yield engine
        engine.check()
    finally:
        await engine.close()
        await asyncio.gather(loop, return_exceptions=True)


async def answer(engine: Engine, prompt: Ids, context: str | None = None) -> Ids:
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_end_token=True)
    stream = engine.submit(Prompt(context=context, token_ids=prompt, sampling=sampling))
    return tuple([t async for event in stream if isinstance(event, Tokens) for t in event.token_ids])


async def ingest(engine: Engine, context: str, token_ids: Ids) -> None:
    """Into a new context that may become long, or on the end of one."""
    is_new = context not in [view.id for view in engine.list_contexts()]
    settings = ContextSettings(capacity=CAPACITY) if is_new else ContextSettings()
    document = Document(context=context, token_ids=token_ids, append=not is_new, settings=settings)
    _ = [event async for event in engine.ingest(document)]


class Logits:
    """Notes what rank 0 samples from: of the first row, step by step."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []

    def watch(self, number: int, rank: Rank) -> None:
        """Hand this to `running`."""
        choose = rank._sampler.choose

        def watched(rows: Sequence[Row], logits_RV: torch.Tensor) -> tuple[list[int], dict[int, Logprobs]]:
            self._found.append(logits_RV[0].float())
            return choose(rows, logits_RV)

        rank._sampler.choose = watched

    def first(self, count: int) -> torch.Tensor:
        """[T, V] of the first steps, which belong to the first answer."""
        return torch.stack(self._found[:count])


async def fresh(engine: Engine, prompt: Ids) -> list[Ids]:
    return [await answer(engine, prompt)]


async def kept(engine: Engine, prompt: Ids) -> list[Ids]:
    """Asked twice, and something else between."""
    await ingest(engine, "book", prompt[:KEPT])
    first = await answer(engine, prompt[KEPT:], "book")
    await answer(engine, prompt[:70], "book")
    return [first, await answer(engine, prompt[KEPT:], "book")]


async def questioned(engine: Engine, prompt: Ids) -> list[Ids]:
    """The rest is shorter than replicate_below, so it runs as replicated rows and not as a chunk."""
    await ingest(engine, "book", prompt[:-19])
    return [await answer(engine, prompt[-19:], "book")]


async def appended(engine: Engine, prompt: Ids) -> list[Ids]:
    for start, end in ((0, 411), (411, 420), (420, KEPT)):
        await ingest(engine, "book", prompt[start:end])
    return [await answer(engine, prompt[KEPT:], "book")]


async def forked(engine: Engine, prompt: Ids) -> list[Ids]:
    """Inside of segments whose ends are wrong, and whose other owners go away."""
    wrong = prompt[::-1]
    await ingest(engine, "trunk", prompt[:411] + wrong[:150])
    engine.fork_context("trunk", "branch", 411)
    await ingest(engine, "branch", prompt[411:700] + wrong[:100])
    engine.fork_context("branch", "twig", 650)
    engine.delete_context("trunk")
    engine.delete_context("branch")
    await ingest(engine, "twig", prompt[650:KEPT])
    engine.fork_context("twig", "leaf", KEPT - 50)
    return [await answer(engine, prompt[KEPT:], "twig"), await answer(engine, prompt[KEPT - 50 :], "leaf")]


STATES: dict[str, State] = {state.__name__: state for state in (fresh, kept, questioned, appended, forked)}
