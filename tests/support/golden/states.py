"""The states in which a prompt can be when it is asked: all of them must give the same answer."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import torch

from coordinator.engine.engine import Engine
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import Row
from tests.support.golden.asking import Ids, answer, ingest
from tests.support.running import running as run
from tests.support.threads import Spoil, ThreadRanks
from workers.rank import Rank
from workers.sampling.sampler import Choice

State = Callable[[Engine, Ids], Awaitable[list[Ids]]]
"""Brings a prompt into its state and asks it; each of the answers must be the golden one."""

CONTEXT_LEN = 900
"""Tokens of the prompt that a context holds; the rest is asked."""


@contextlib.asynccontextmanager
async def running(config: EngineConfig, spoil: Spoil | None = None, machines: str = "") -> AsyncIterator[Engine]:
    """An engine on ranks that are threads."""
    async with run(Engine(ThreadRanks(config, spoil, machines), config, max_positions=8192)) as found:
        yield found.engine


class Logits:
    """Records the logits from which rank 0 samples: the first row, step by step."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []

    def watch(self, number: int, rank: Rank) -> None:
        """Hand this to `running`."""
        start = rank.sampler.start

        def watched(rows: Sequence[Row], logits_RV: torch.Tensor) -> Choice:
            self._found.append(logits_RV[0].float())
            return start(rows, logits_RV)

        rank.sampler.start = watched

    def first(self, count: int) -> torch.Tensor:
        """[T, V] of the first steps, which belong to the first answer."""
        return torch.stack(self._found[:count])


async def fresh(engine: Engine, prompt: Ids) -> list[Ids]:
    return [await answer(engine, prompt)]


async def kept(engine: Engine, prompt: Ids) -> list[Ids]:
    """Asked twice, and something else between."""
    await ingest(engine, "book", prompt[:CONTEXT_LEN])
    first = await answer(engine, prompt[CONTEXT_LEN:], "book")
    await answer(engine, prompt[:70], "book")
    return [first, await answer(engine, prompt[CONTEXT_LEN:], "book")]


async def questioned(engine: Engine, prompt: Ids) -> list[Ids]:
    """The rest is shorter than replicate_below, so it runs as replicated rows and not as a chunk."""
    await ingest(engine, "book", prompt[:-19])
    return [await answer(engine, prompt[-19:], "book")]


async def appended(engine: Engine, prompt: Ids) -> list[Ids]:
    for start, end in ((0, 411), (411, 420), (420, CONTEXT_LEN)):
        await ingest(engine, "book", prompt[start:end])
    return [await answer(engine, prompt[CONTEXT_LEN:], "book")]


async def forked(engine: Engine, prompt: Ids) -> list[Ids]:
    """Inside of segments whose ends are wrong, and whose other owners go away."""
    wrong = prompt[::-1]
    await ingest(engine, "trunk", prompt[:411] + wrong[:150])
    await engine.fork_context("trunk", "branch", 411)
    await ingest(engine, "branch", prompt[411:700] + wrong[:100])
    await engine.fork_context("branch", "twig", 650)
    await engine.delete_context("trunk")
    await engine.delete_context("branch")
    await ingest(engine, "twig", prompt[650:CONTEXT_LEN])
    await engine.fork_context("twig", "leaf", CONTEXT_LEN - 50)
    return [
        await answer(engine, prompt[CONTEXT_LEN:], "twig"),
        await answer(engine, prompt[CONTEXT_LEN - 50 :], "leaf"),
    ]


async def forked_at_ends(engine: Engine, prompt: Ids) -> list[Ids]:
    """At the ends of documents, where windows and recurrent states are kept. The later tokens are wrong, and other
    owners are deleted.
    """
    wrong = prompt[::-1]
    await ingest(engine, "trunk", prompt[:411])
    await ingest(engine, "trunk", wrong[:150])
    await engine.fork_context("trunk", "branch", 411)
    await ingest(engine, "branch", prompt[411:650])
    await ingest(engine, "branch", wrong[:10])
    await engine.fork_context("branch", "twig", 650)
    await engine.delete_context("trunk")
    await engine.delete_context("branch")
    await ingest(engine, "twig", prompt[650:CONTEXT_LEN])
    return [await answer(engine, prompt[CONTEXT_LEN:], "twig")]


STATES: dict[str, State] = {state.__name__: state for state in (fresh, kept, questioned, appended, forked)}
AT_ENDS: dict[str, State] = {**STATES, "forked": forked_at_ends}
"""The same for models that can be forked only at the ends of documents."""
