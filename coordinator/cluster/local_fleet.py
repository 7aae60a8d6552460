"""A fleet of plain processes on this machine, without Ray."""

import asyncio
import logging
import multiprocessing
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from coordinator.cluster.fork_server import SERVER_DIED, StartMethod, ignoring_terminals
from coordinator.cluster.ports import OnDeath, ignore_event
from longleaf.config import LOOPBACK, EngineConfig, apply_environment, check_slots_here, rank_environment
from longleaf.errors import StartError
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from longleaf.resources import end_with_parent, has_gpu_driver

LEAVE_SECONDS = 3.0
END_SECONDS = 1.0
LAST_WORD_SECONDS = 0.5
"""Seconds to wait for the last messages of a process that has exited."""
log = logging.getLogger(__name__)


def _enter(is_forked: bool, variables: dict[str, str], pickled_main: bytes, spec: RankSpec) -> None:
    """Entry of a rank's process. `main` arrives pickled, so that a spawned process imports torch only after
    its environment variables are set. A forked process inherits both from the fork server."""
    if is_forked:
        end_with_parent()
    apply_environment(variables)
    pickle.loads(pickled_main)(spec)


@dataclass(frozen=True)
class _Place:
    """A member's process, in the slot of this index."""

    slot: int
    process: BaseProcess
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class LocalFleet:
    """One process per rank, started to run `main(spec)`, for instance workers.__main__.main."""

    def __init__(
        self,
        main: Callable[[RankSpec], None],
        method: StartMethod = "forkserver",
        kill_server: Callable[[], None] = lambda: None,
    ) -> None:
        """`kill_server` kills the fork server if a process start hangs in it at shutdown."""
        self._main = main
        self._method: StartMethod = method
        self._kill_server = kill_server
        self._num_slots = 0
        self._places: dict[int, _Place] = {}
        """By member number. The entry of an ended process is removed when the process is replaced."""
        self._on_death: OnDeath = ignore_event
        self._is_stopping = False
        self._spawning = threading.Lock()

    @property
    def num_missing(self) -> int:
        return 0  # the number of slots of this machine is fixed

    async def reserve(self, config: EngineConfig, patience: float = 0.0) -> str:
        check_slots_here(config.world_size)
        if config.device == "cuda" and not has_gpu_driver():  # otherwise each rank would start, and report it
            raise StartError("device: cuda is not available: this machine has no GPU driver")
        return LOOPBACK

    async def rank_memory(self) -> int | None:
        return None  # the command that starts a service on this machine has chosen the weights

    async def launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo], on_death: OnDeath) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_slots, self._on_death = len(invitations), on_death
        for member, invitation in enumerate(invitations):
            await self._start(self._spec(member, member, invitation, config), member)

    def _spec(self, member: int, slot: int, invitation: ConnectInfo, config: EngineConfig) -> RankSpec:
        return RankSpec(
            member=member,
            config=config,
            invitation=invitation,
            host=LOOPBACK,
            node=socket.gethostname(),
            num_ranks_here=self._num_slots,
            is_first_here=member == 0 or member != slot,  # replacements are checked as well
            gpu=slot,
            num_ranks_seeing=self._num_slots,
        )

    async def _start(self, spec: RankSpec, slot: int) -> None:
        place = await asyncio.to_thread(self._spawn, spec, slot)
        if place is not None:
            self._loop.add_reader(place.process.sentinel, self._on_exit, spec.member, place)

    def _spawn(self, spec: RankSpec, slot: int) -> _Place | None:
        """Returns None when the fleet is shutting down."""
        with self._spawning:
            try:
                process = None if self._is_stopping else self._start_process(spec)
            except (OSError, EOFError) as error:
                if self._is_stopping:
                    return None
                if self._method == "spawn":
                    raise
                self._spawn_from_now_on(f"cannot be used: {error}")
                process = None if self._is_stopping else self._start_process(spec)
            if process is None:
                return None
            place = self._places[spec.member] = _Place(slot, process)
            return place

    def _start_process(self, spec: RankSpec) -> BaseProcess:
        context: Any = multiprocessing.get_context(self._method)
        variables = rank_environment(spec.config.threads_per_rank)
        arguments = (self._method == "forkserver", variables, pickle.dumps(self._main), spec)
        process = context.Process(target=_enter, args=arguments, name=f"rank-{spec.member}", daemon=True)
        with ignoring_terminals():
            process.start()
        return process

    def _spawn_from_now_on(self, reason: str) -> None:
        """Starts later processes without a fork server, since a new one would lack the environment of the first."""
        if self._method == "forkserver":
            log.warning("the fork server %s; replacements will start more slowly", reason)
            self._method = "spawn"

    def _on_exit(self, member: int, place: _Place) -> None:
        self._loop.remove_reader(place.process.sentinel)
        place.has_ended.set()
        reason, code = _describe(place.process), place.process.exitcode
        if code == SERVER_DIED:
            self._spawn_from_now_on("has ended")
        if code is not None and code < 0:
            self._notify(member, reason)
        else:  # a member that exits reports the reason itself, which is more specific
            self._loop.call_later(LAST_WORD_SECONDS, self._notify, member, reason)

    def _notify(self, member: int, reason: str) -> None:
        if not self._is_stopping:
            self._on_death(member, reason)

    def location_of(self, member: int) -> str:
        return ""  # all members are on this machine

    async def kill(self, member: int) -> None:
        place = self._places.get(member)
        if place is not None and not place.has_ended.is_set():
            place.process.kill()
            with suppress(TimeoutError):  # a process that hangs in the kernel ends later
                await asyncio.wait_for(place.has_ended.wait(), END_SECONDS)

    async def replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        if lost not in self._places:
            raise StartError(f"member {lost} has no slot")
        await self.kill(lost)
        slot = self._places[lost].slot
        await self._start(self._spec(member, slot, invitation, config), slot)
        self._places.pop(lost, None)  # not before: if the start fails, the slot can be used again

    async def shutdown(self) -> None:
        """Waits a few seconds for ranks that were asked to stop. Terminates, then kills those that still run."""
        self._is_stopping = True
        # Wait for a process that is being started, so that it is ended as well. A fork server that hangs or is still
        # importing is killed.
        if not await asyncio.to_thread(self._spawning.acquire, timeout=LEAVE_SECONDS if self._places else 0):
            self._kill_server()
            await asyncio.to_thread(self._spawning.acquire)
        self._spawning.release()
        processes = [place.process for place in self._places.values()]
        for process in processes:
            self._loop.remove_reader(process.sentinel)
        await asyncio.to_thread(_reap, processes)
        self._places.clear()


def _reap(processes: Sequence[BaseProcess]) -> None:
    _join_all(processes, LEAVE_SECONDS)
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            end(process)
        _join_all(processes, END_SECONDS)


def _join_all(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Waits until all have ended, at most `seconds` in total."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))


def _describe(process: BaseProcess) -> str:
    process.join(timeout=LEAVE_SECONDS)
    code = process.exitcode
    if code == SERVER_DIED:
        return "ended because the fork server ended"
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
