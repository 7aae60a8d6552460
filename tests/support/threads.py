"""Ranks as threads of the test process: the real workers behind the engine's port, without processes or sockets."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, cast

from coordinator.cluster.ports import EpochEnd, Formation
from coordinator.cluster.snapshot_requests import Key, error_of
from longleaf.config import EngineConfig
from longleaf.errors import RankLost
from longleaf.rank_protocol.encoding import decode_to_rank, encode
from longleaf.rank_protocol.group_messages import Join, KvLayout, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from longleaf.rank_protocol.snapshots import Discard, Fetch, Fetched, Outcome, Save, Saved
from longleaf.rank_protocol.step import StepPlan, StepResult
from longleaf.shares import even_share
from longleaf.topology import Topology
from longleaf.types import Loss
from tests.support.loopback import LoopbackComm, loopback_groups
from workers.rank import Rank
from workers.rank_runtime import StepHandle

Spoil = Callable[[int, Rank], None]


def make_spec(rank: int, config: EngineConfig) -> RankSpec:
    unused = ConnectInfo(address="", server_key=b"", public_key=b"", secret_key=b"")
    place = {"host": "127.0.0.1", "node": "here", "num_ranks_here": config.world_size, "gpu": 0}
    return RankSpec(member=rank, config=config, invitation=unused, **place)


class ThreadRanks:
    """Implements coordinator.cluster.ports.Ranks, for one epoch, with one thread per rank over a loopback group.

    `machines` has a letter per rank, the machine that it pretends to run on; by default all are on one.
    """

    def __init__(
        self,
        config: EngineConfig,
        spoil: Spoil | None = None,
        machines: str = "",
        make_rank: Callable[[RankSpec], Rank] = Rank,
    ) -> None:
        self._ranks = [make_rank(make_spec(rank, config)) for rank in range(config.world_size)]
        self._groups = loopback_groups(Topology(tuple(machines) or ("here",) * config.world_size))
        self._plans: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in self._ranks]
        self._results: queue.Queue[Future[StepResult]] = queue.Queue()
        """Futures of the plans in flight, in the order of sending: rank 0 answers in this order."""
        self._orders: dict[Key, Future[Outcome]] = {}
        self._readies: queue.Queue[Ready] = queue.Queue()
        self._threads = [threading.Thread(target=self._run, args=(r,), daemon=True) for r in range(len(self._ranks))]
        self._spoil = spoil
        self._ended: Future[EpochEnd] = Future()
        """Set by the first rank that fails."""
        self.losses: tuple[Loss, ...] = ()
        self.missing_weights = 0.0

    async def start(self, epoch: int) -> Formation:
        self._join = Join(epoch, 0, "", 0, ("here",))
        for index, rank in enumerate(self._ranks):
            rank.load(even_share(index, len(self._ranks)))
            self._threads[index].start()
        readies = [await asyncio.to_thread(self._readies.get, timeout=120) for _ in self._ranks]
        hellos = tuple(Hello(rank, "here", "127.0.0.1", 0) for rank in range(len(self._ranks)))
        return Formation(epoch, hellos, tuple(sorted(readies, key=lambda ready: ready.member)), cast(Any, self))

    async def form(self, epoch: int) -> Formation:
        """Raises the error that ended the only epoch."""
        raise self._ended.result().error

    async def send_layout(self, layout: KvLayout) -> None:
        raise NotImplementedError

    async def step(self, plan: StepPlan) -> StepResult:
        result: Future[StepResult] = Future()
        self._results.put(result)
        for plans in self._plans:
            plans.put(encode(plan))
        async with asyncio.timeout(120):
            return await asyncio.wrap_future(result)

    async def wait_ended(self) -> EpochEnd:
        """Threads do not die, but a rank may raise."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    async def wait_joinable(self) -> None:
        """Nor do others come."""
        await asyncio.get_running_loop().create_future()

    async def wait_ready(self) -> None:
        """No rank is ever lost."""

    async def save(self, member: int, order: Save) -> Saved:
        outcome = await self._order(member, order)
        assert isinstance(outcome, Saved)
        return outcome

    async def fetch(self, member: int, order: Fetch) -> None:
        await self._order(member, order)

    async def discard(self, member: int, tickets: Sequence[int]) -> None:
        self._plans[member].put(encode(Discard(tuple(tickets))))

    async def _order(self, member: int, order: Save | Fetch) -> Outcome:
        outcome: Future[Outcome] = Future()
        self._orders[member, Saved if isinstance(order, Save) else Fetched, order.ticket] = outcome
        self._plans[member].put(encode(order))
        async with asyncio.timeout(120):
            reported = await asyncio.wrap_future(outcome)
        if reported.failure is not None:
            raise error_of(order.name, reported.failure)
        return reported

    def _deliver(self, outcome: Outcome) -> None:
        self._orders.pop((outcome.member, type(outcome), outcome.ticket)).set_result(outcome)

    async def close(self) -> None:
        for plans, thread in zip(self._plans, self._threads, strict=True):
            plans.put(None)
            if thread.ident is not None:
                thread.join(timeout=60)

    def _run(self, index: int) -> None:
        rank = self._ranks[index]
        self._readies.put(rank.connect(self._groups[index]) if len(self._ranks) > 1 else rank.join(self._join))
        if self._spoil:
            self._spoil(index, rank)
        begun: StepHandle | None = None
        while (data := self._plans[index].get()) is not None:
            try:
                plan = decode_to_rank(data)
                if isinstance(plan, Save | Fetch | Discard):
                    rank.submit_order(plan, self._deliver)
                    continue
                assert isinstance(plan, StepPlan)
                if begun is not None and not plan.may_overlap:
                    self._answer(begun)
                    begun = None
                last, begun = begun, rank.start(plan)
                if last is not None:
                    self._answer(last)
                if begun.is_done or self._plans[index].empty():
                    self._answer(begun)
                    begun = None
            except Exception as error:
                world = self._groups[index].world
                assert isinstance(world, LoopbackComm)
                world.abort()
                self._fail(error)
                return

    def _answer(self, begun: StepHandle) -> None:
        """Waits for the end of a step."""
        result = begun.result()
        if result is not None and (waiting := self._results.get()).set_running_or_notify_cancel():
            waiting.set_result(result)

    def _fail(self, error: Exception) -> None:
        """Fails the steps in flight. If several ranks fail together, the first one reports the reason."""
        lost = RankLost(0, repr(error))
        lost.__cause__ = error
        with contextlib.suppress(InvalidStateError):
            self._ended.set_result(EpochEnd(lost))
        while True:
            try:
                waiting = self._results.get_nowait()
            except queue.Empty:
                return
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(lost)


def config_for(model: Path, **settings: object) -> EngineConfig:
    """Settings for small models: small pool, small blocks."""
    defaults: dict[str, object] = {"block_size": 64, "kv_bytes": 48 << 20, "dtype": "float32"}
    return EngineConfig(model=str(model), **{**defaults, **settings})  # type: ignore[arg-type]
