"""The control channel: step messages to the ranks and one answer back, over ZMQ.

Each rank has two connections: one on which it receives and answers, and one on which a thread of its own reports that
the process lives. Ray never carries a step: a ZMQ message costs tens of microseconds, a Ray call milliseconds.

Whoever is no member is refused while connecting (coordinator.ranks.members), and a member is heard for its own rank
only: what else arrives is ignored and counted.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from coordinator.ranks.blame import Losses
from coordinator.ranks.members import Members, Tally
from longleaf.channel.encoding import FromRank, ToRank, decode_from_rank, encode
from longleaf.channel.lives import PULSE_SECONDS, Died, Heartbeat, Hello, Join, Ready, Stop
from longleaf.channel.step import StepPlan, StepResult
from longleaf.config import LOOPBACK, EngineConfig, join_address
from longleaf.errors import LongleafError, StartError, WorkerLost
from longleaf.topology import Topology
from longleaf.units import human_seconds

LINGER_MILLISECONDS = 500
MAX_REPORT_BYTES, MAX_ROW_BYTES = 256 << 10, 2 << 10
"""What a rank says at most, and for each sequence of a step. More ends its connection before memory is taken."""
log = logging.getLogger(__name__)


class Control:
    """The ranks over ZMQ. Must be made inside a running event loop; `lost` may be called from any thread.

    `max_missed` is the number of seconds without a word after which a rank that has spoken before is given up.
    """

    def __init__(self, config: EngineConfig, host: str = LOOPBACK, *, max_missed: int = 15) -> None:
        self._config = config
        self._max_missed = max_missed
        self._context = zmq.asyncio.Context()
        self._members = Members(self._context)
        # Untyped, because the package's own annotations are partial.
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES + config.max_sequences * MAX_ROW_BYTES)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._members.guard(self._socket)
        self._socket.bind(f"tcp://{join_address(host, 0)}")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where the ranks connect."""
        self.invitations = tuple(self._members.invite(rank, self.address) for rank in range(config.world_size))
        """What each rank needs to connect, in rank order."""
        self._ignored = Tally("ignored messages of ranks")
        self._loop = asyncio.get_running_loop()
        self._losses = Losses(self._loop)
        self._hellos: dict[int, Hello] = {}
        self._readies: dict[int, Ready] = {}
        self._missed: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._results: dict[tuple[int, int], asyncio.Future[StepResult]] = {}
        """By the epoch and number of a step under way: an answer to any other is dropped."""
        self._tasks = [self._loop.create_task(self._receive()), self._loop.create_task(self._watch_pulses())]
        self._is_closed = False

    @property
    def num_refused(self) -> int:
        """Connections of strangers so far that were ended."""
        return self._members.num_refused

    @property
    def num_ignored(self) -> int:
        """Messages so far that a rank may not send."""
        return self._ignored.count

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """Who the ranks are, in rank order."""
        return tuple(self._hellos[rank] for rank in sorted(self._hellos))

    def lost(self, rank: int, reason: str) -> None:
        """Tells that the process of `rank` ended. Any thread may call it, at any time."""
        with suppress(RuntimeError):  # the loop has ended, and with it everybody who would want to know
            self._loop.call_soon_threadsafe(self._losses.died, rank, reason)

    async def wait_lost(self) -> LongleafError:
        return await asyncio.shield(self._losses.verdict)

    # --- start ---

    async def start(self, epoch: int) -> tuple[Ready, ...]:
        """All ranks say hello, are told where to meet, load, meet and report."""
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await self._wait_for(self._hellos)
                await self._send_all(self._join(epoch))
                await self._wait_for(self._readies)
        except TimeoutError:
            raise self._late() from None
        return tuple(self._readies[rank] for rank in sorted(self._readies))

    def _join(self, epoch: int) -> Join:
        first = self._hellos[0]
        topology = Topology(tuple(hello.node for hello in self.hellos))
        topology.check(self._config.world_size)
        return Join(epoch, first.host, first.store_port, topology.nodes)

    async def _wait_for(self, reports: dict[int, Hello] | dict[int, Ready]) -> None:
        """Waits until every rank has put something into `reports`. Raises what ended a rank."""
        while len(reports) < self._config.world_size:
            self._changed.clear()
            changed = self._loop.create_task(self._changed.wait())
            await asyncio.wait([changed, self._losses.verdict], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if self._losses.verdict.done():
                raise self._losses.verdict.result()

    def _late(self) -> StartError:
        late = [rank for rank in range(self._config.world_size) if rank not in self._readies]
        names = ", ".join(map(str, late))
        return StartError(f"rank {names} did not start within {human_seconds(self._config.start_timeout)}")

    # --- step ---

    async def step(self, plan: StepPlan) -> StepResult:
        """Sends the plan to every rank and waits for rank 0's answer. Raises WorkerLost.

        Its deadline counts from the answer to the plan before it: only then do the ranks begin.
        """
        before = tuple(self._results.values())
        result = self._results[plan.epoch, plan.step] = self._loop.create_future()
        try:
            async with self._sending:
                await self._send_all(plan)
            for earlier in before:
                await self._wait_or_lose(earlier)
            # Plain attention computes on one rank what the step shares, and in coarse types twice.
            num_tokens = plan.num_tokens + 2 * plan.num_reference * self._config.world_size
            seconds = self._config.step_timeout + num_tokens * self._config.step_timeout_per_token
            await self._wait_or_lose(result, seconds)
            if not result.done():
                self._losses.conclude(self._overdue(plan, seconds))
                raise await self.wait_lost()
            return result.result()
        finally:
            del self._results[plan.epoch, plan.step]

    async def _wait_or_lose(self, result: asyncio.Future[StepResult], seconds: float | None = None) -> None:
        """Waits until `result` is there or `seconds` are over. Raises WorkerLost."""
        awaited = [result, self._losses.verdict]
        if not result.done():
            await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._losses.is_suspected:
            raise await self.wait_lost()

    def _overdue(self, plan: StepPlan, seconds: float) -> WorkerLost:
        """Blames the rank that is silent longest; when all have a pulse, rank 0, which owes the answer."""
        rank = max(self._missed, key=lambda rank: (self._missed[rank], -rank), default=0)
        rank = rank if self._missed.get(rank, 0) > 2 else 0
        return WorkerLost(rank, f"step {plan.step} took longer than its {human_seconds(seconds)}")

    async def _send_all(self, message: ToRank) -> None:
        data = encode(message)
        for invitation in self.invitations:
            await self._socket.send_multipart([invitation.commands_id, data])

    # --- receive ---

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                message = self._read(frames)
            except ValueError as error:
                self._ignored.add(str(error))
                continue
            self._take(message)

    def _read(self, frames: list[Any]) -> FromRank:
        """What a member says. Raises ValueError unless it says it for itself, on the connection for it."""
        rank = self._members.rank_of(frames[-1].get("User-Id").encode())
        if rank is None or len(frames) != 2:
            raise ValueError(f"{len(frames)} frames of {'a former member' if rank is None else f'rank {rank}'}")
        message = decode_from_rank(frames[1].buffer)
        invitation = self.invitations[rank]
        expected = invitation.pulse_id if isinstance(message, Heartbeat) else invitation.commands_id
        speaks_for = 0 if isinstance(message, StepResult) else message.rank
        blamed = (message.blamed or 0) if isinstance(message, Died) else 0
        if speaks_for != rank or frames[0].bytes != expected or not 0 <= blamed < self._config.world_size:
            raise ValueError(f"rank {rank} sends what it may not: {type(message).__name__} for rank {speaks_for}")
        return message

    def _take(self, message: FromRank) -> None:
        match message:
            case Hello():
                self._hellos[message.rank] = message
            case Ready():
                self._readies[message.rank] = message
            case StepResult():
                result = self._results.get((message.epoch, message.step))
                if result is not None and not result.done():
                    result.set_result(message)
                return
            case Died(refused=True):
                self._losses.conclude(StartError(message.reason))
            case Died():
                self._losses.failed(message.rank, message.reason, message.blamed)
            case Heartbeat():
                pass
        self._missed[message.rank] = 0
        self._changed.set()

    async def _watch_pulses(self) -> None:
        """Counts the seconds in which a rank said nothing. Counting, unlike comparing times, forgives a coordinator
        that was itself stopped for a while."""
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            for rank in self._missed:
                self._missed[rank] += 1
                if self._missed[rank] > self._max_missed:
                    self._losses.conclude(WorkerLost(rank, f"has been silent for {human_seconds(self._max_missed)}"))

    # --- close ---

    async def close(self) -> None:
        """Tells the ranks to leave. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._send_all(Stop())
        await self._members.close(self._socket)
        self._socket.close()
        await asyncio.to_thread(self._context.term)
