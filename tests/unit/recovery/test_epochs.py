"""Changes of epoch: streams, contexts and views after ranks are lost or join, on fake ranks."""

import asyncio
import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.engine.engine import Engine
from coordinator.engine.stream import Stream
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.recovery.epochs import Epoch
from longleaf.config import EngineConfig
from longleaf.errors import ContextLost, NotFound, Unavailable
from longleaf.rank_protocol.step import Move, Prefill
from longleaf.sampling import SamplingParams
from longleaf.types import Loss, Recovering
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.ranks import FakeRanks
from tests.support.gated import comes_to
from tests.support.running import running

pytestmark = pytest.mark.timeout(60)
CONFIG = EngineConfig(model="none", world_size=3, chunk_size=32, block_size=4, replicate_below=8)
DOCUMENT = list(range(96))


def prompt(count: int, max_tokens: int, context: str | None = None) -> Prompt:
    return Prompt(context=context, token_ids=tuple(range(count)), sampling=SamplingParams(max_tokens=max_tokens))


def make_engine(ranks: FakeRanks) -> Engine:
    return Engine(ranks, CONFIG, max_positions=3000)


async def ingest(engine: Engine, context: str = "doc") -> None:
    [_ async for _ in engine.ingest(DocumentPrompt(context=context, token_ids=DOCUMENT))]


async def read(stream: Stream) -> tuple[list[int], list[Any]]:
    """The tokens, each index once, and all other events."""
    ids, others = list[int](), list[Any]()
    async for event in stream:
        if isinstance(event, Tokens):
            assert event.index == len(ids)
            ids += event.token_ids
        else:
            others.append(event)
    return ids, others


def answer(last: int, count: int) -> list[int]:
    found: list[int] = []
    for index in range(count):
        last = echo_token(last, index)
        found.append(last)
    return found


@pytest.mark.parametrize("lost_rank", [0, 2])
async def test_streams_continue_and_lost_tokens_are_recomputed(lost_rank: int) -> None:
    ranks = FakeRanks(3, 100, lost_rank=lost_rank)
    async with running(make_engine(ranks)) as found:
        engine = found.engine
        await ingest(engine)
        resident = engine.get_context("doc").shares[lost_rank].tokens
        streams = [engine.submit(prompt(3, 60, "doc")), engine.submit(prompt(5, 60))]
        ranks.lose_at = len(ranks.plans) + 9
        reported = await asyncio.gather(*map(read, streams))
        assert [ids for ids, _ in reported] == [answer(2, 60), answer(4, 60)]
        assert any(isinstance(event, Recovering) for event in reported[0][1])
        recomputed = [plan for plan in ranks.plans if plan.epoch == 2 and isinstance(plan.work, Prefill)]
        assert sum(len(plan.work.token_ids) for plan in recomputed if plan.work.path == (0,)) == resident
        cluster = engine.cluster()
        assert (cluster.world_size, cluster.epoch, [worker.rank for worker in cluster.workers]) == (2, 2, [0, 1])
        assert cluster.recovery is not None
        assert (cluster.recovery.lost_tokens, cluster.recovery.recovered_tokens) == (resident, resident)
        assert (cluster.recovery.is_done, cluster.recovery.epoch, cluster.recovery.dropped_contexts) == (True, 2, ())
        assert engine.get_context("doc").tokens == 96
        assert [layout.epoch for layout in ranks.layouts] == [2]
        assert (await read(engine.submit(prompt(3, 9, "doc"))))[0] == answer(2, 9)
        engine.audit()


async def test_joining_rank_receives_a_share_of_the_tokens() -> None:
    ranks = FakeRanks(3, 100)
    async with running(make_engine(ranks)) as found:
        engine = found.engine
        await ingest(engine)
        ranks.lose(1, "vanished")
        await comes_to(engine, lambda: engine.cluster().epoch == 2)
        stream = engine.submit(prompt(3, 400, "doc"))
        ranks.load(7)
        await comes_to(engine, lambda: engine.cluster().epoch == 3)
        assert (await read(stream))[0] == answer(2, 400)
        await comes_to(engine, lambda: min(worker.tokens for worker in engine.cluster().workers) >= 28)
        assert [worker.pid for worker in engine.cluster().workers] == [1000, 1002, 1007]
        assert any(isinstance(plan.work, Move) for plan in ranks.plans)
        assert [layout.epoch for layout in ranks.layouts] == [2, 3]
        assert sum(share.tokens for share in engine.get_context("doc").shares) == 96


async def test_loss_during_a_join_is_reported() -> None:
    class Unlucky(FakeRanks):
        async def form(self, epoch):
            if self.joinable:
                self.members.remove(1)
            return await super().form(epoch)

    ranks = Unlucky(3, 100)
    async with running(make_engine(ranks)) as found:
        engine = found.engine
        await ingest(engine)
        resident = engine.get_context("doc").shares[1].tokens
        ranks.load(7)
        await comes_to(engine, lambda: engine.cluster().epoch == 2)
        await comes_to(engine, lambda: (seen := engine.cluster().recovery) is not None and seen.is_done)
        recovery = engine.cluster().recovery
        assert recovery is not None
        assert (recovery.epoch, recovery.lost_tokens, recovery.recovered_tokens) == (2, resident, resident)


async def test_lost_rank_leaves_the_view_before_a_new_group_is_formed() -> None:
    ranks = FakeRanks(3, 16)
    async with running(make_engine(ranks)) as found:
        ranks.publish((Loss(time=0.0, member=1, rank=1, epoch=1, node="", reason="vanished", slot="waiting"),))
        cluster = found.engine.cluster()
        assert [worker.rank for worker in cluster.workers] == [0, 2]
        assert (cluster.world_size, cluster.epoch) == (2, 1)


async def test_contexts_are_dropped_if_the_remaining_ranks_are_too_small() -> None:
    ranks = FakeRanks(3, 16)
    async with running(make_engine(ranks)) as found:
        engine = found.engine
        await ingest(engine, "old")
        await ingest(engine, "new")
        ranks.lose(2, "vanished")
        await comes_to(engine, lambda: engine.cluster().epoch == 2)
        with pytest.raises(ContextLost, match="does not fit"):
            engine.get_context("old")
        with pytest.raises(ContextLost):
            engine.submit(prompt(3, 4, "old"))
        recovery = engine.cluster().recovery
        assert recovery is not None
        assert recovery.dropped_contexts == ("old",)
        with pytest.raises(ContextLost):
            await engine.fork_context("old", "other")
        await engine.fork_context("new", "old", 8)
        await engine.delete_context("old")
        with pytest.raises(NotFound):  # another context of that name was added and deleted
            engine.get_context("old")
        assert (await read(engine.submit(prompt(3, 9, "new"))))[0] == answer(2, 9)


async def test_contexts_are_dropped_only_if_no_replacement_is_expected() -> None:
    ranks = FakeRanks(3, 16)
    loss = Loss(time=0.0, member=2, rank=2, epoch=1, node="", reason="vanished", slot="waiting")
    async with running(make_engine(ranks)) as found:
        engine = found.engine
        await ingest(engine, "old")
        await ingest(engine, "new")
        ranks.publish((loss,))
        ranks.lose(2, "vanished")
        await comes_to(engine, lambda: engine.cluster().epoch == 2)
        assert engine.get_context("old").tokens == 96, "it is dropped only as a last resort"
        ranks.publish((replace(loss, slot="abandoned"),))
        await comes_to(engine, lambda: not any(context.id == "old" for context in engine.list_contexts()))
        with pytest.raises(ContextLost, match="does not fit"):
            engine.get_context("old")


@pytest.mark.parametrize(("is_deadly", "num_epochs"), [(False, 2), (True, 4)])
async def test_job_that_breaks_several_epochs_fails_alone(is_deadly: bool, num_epochs: int) -> None:
    """It fails with the second epoch that it breaks, or with the fourth in which a rank dies."""

    class Poisoned(FakeRanks):
        num_ended = 0

        async def step(self, plan):
            if not isinstance(plan.work, Prefill | Move) and any(666 in row.token_ids for row in plan.work.rows):
                self.num_ended += 1
                if is_deadly:
                    self.lose(0, "choked", plan.step)
                    self.load(100 + plan.epoch)
                else:
                    self.break_epoch("choked", plan.step)
            return await super().step(plan)

    ranks = Poisoned(3, 100)
    async with running(make_engine(ranks)) as found:
        engine = found.engine
        await ingest(engine)
        others = [engine.submit(prompt(3, 300, "doc")), engine.submit(prompt(4, 300))]
        poison = engine.submit(Prompt(context=None, token_ids=(666,), sampling=SamplingParams(max_tokens=3)))
        reported = await asyncio.gather(read(poison), *map(read, others), return_exceptions=True)
        assert isinstance(reported[0], Unavailable)
        assert [ids for ids, _ in reported[1:]] == [answer(2, 300), answer(3, 300)]
        assert ranks.num_ended == num_epochs
        engine.audit()


async def test_many_poison_jobs_do_not_end_the_service() -> None:
    class Poisoned(FakeRanks):
        async def step(self, plan):
            if not isinstance(plan.work, Prefill | Move) and any(666 in row.token_ids for row in plan.work.rows):
                self.break_epoch("choked", plan.step)
            return await super().step(plan)

    async with running(make_engine(Poisoned(3, 100))) as found:
        engine = found.engine
        poison = Prompt(context=None, token_ids=(666,), sampling=SamplingParams(max_tokens=3))
        reported = await asyncio.gather(*(read(engine.submit(poison)) for _ in range(12)), return_exceptions=True)
        assert all(isinstance(one, Unavailable) for one in reported)
        assert (await read(engine.submit(prompt(5, 9))))[0] == answer(4, 9)


async def test_repeated_failures_before_the_first_step_end_the_service() -> None:
    class Disagreeing(FakeRanks):
        async def send_layout(self, layout):
            await super().send_layout(layout)
            self.break_epoch("that cannot be held")

    ranks = Disagreeing(3, 100)
    async with running(make_engine(ranks)) as found:
        stream = found.engine.submit(prompt(5, 60))
        ranks.break_epoch("hung")
        message = "8 epochs in a row ended without a step; latest error: that cannot be held"
        with pytest.raises(Unavailable, match=message):
            await read(stream)
        with pytest.raises(Unavailable, match=message):
            await found.loop


@pytest.mark.parametrize(("bytes_per_token", "expected"), [(1 << 10, 4096), (320 << 10, 12), (1 << 30, 1)])
async def test_moves_of_a_step_are_limited_by_stream_latency(bytes_per_token: int, expected: int) -> None:
    formation = await FakeRanks(2).start(1)
    readies = tuple(replace(ready, bytes_per_token=bytes_per_token) for ready in formation.readies)
    assert Epoch.first(dataclasses.replace(formation, readies=readies), 16).max_moved_blocks == expected
