"""Manages the ranks over the control channel: the members, which load the model, and the epochs that they form.

A verdict ends an epoch but not its members: the remaining members keep the model and their KV cache, and can join the
next epoch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from coordinator.cluster.control_socket import ControlSocket
from coordinator.cluster.groups.group import RankGroup
from coordinator.cluster.groups.rendezvous import in_rank_order
from coordinator.cluster.loss_history import LossHistory
from coordinator.cluster.member import Member
from coordinator.cluster.member_registry import MemberRegistry
from coordinator.cluster.model_consistency import check_models
from coordinator.cluster.ports import (
    EpochEnd,
    Formation,
    Kill,
    LocationOf,
    MemberEvent,
    MemberJoined,
    MemberLost,
    unknown_node,
)
from coordinator.cluster.rank_logs import RankLogForwarder
from coordinator.cluster.snapshot_requests import SnapshotRequests
from coordinator.cluster.weight_deal import NO_PARTS, WeightDealer
from longleaf.config import LOOPBACK, EngineConfig
from longleaf.errors import GroupFailed, LongleafError, StartError, Unavailable
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.encoding import FromRank
from longleaf.rank_protocol.group_messages import GroupFailure, MergeTiming, Ready, StoreOpened
from longleaf.rank_protocol.log_messages import Logged
from longleaf.rank_protocol.member_messages import Died, Heartbeat, Hello, Loaded, WeightsReady
from longleaf.rank_protocol.snapshots import Discard, Fetch, Fetched, Save, Saved
from longleaf.rank_protocol.step import StepResult
from longleaf.shares import NUM_PARTS
from longleaf.topology import Topology
from longleaf.types import Loss

MAX_ATTEMPTS = 6
"""Consecutive epoch numbers that are tried before `form` fails."""
FORM_SHARE = 2.0
"""Minimum timeout of later epochs, as a multiple of the formation time of the first: on GPUs all graphs are captured
again.
"""
MAX_LATE = 2
"""A member that is late for this many consecutive epochs is killed."""
ANSWER_SECONDS = 2.0
"""Seconds for the members to abort an epoch that did not form in time. A member that does not answer is late: the
others were waiting for it.
"""
log = logging.getLogger(__name__)


async def no_process(member: int) -> None:
    """A Kill that does nothing, for use without a fleet."""
    del member


def _log(event: MemberEvent) -> None:
    """Log the event as a warning, the lowest severity that the operator sees on standard error."""
    log.warning("%s", event)


class RankManager:
    """Manages the ranks over ZMQ. Must be created inside a running event loop; `on_process_exit` may be called from any
    thread.

    `kill` ends the process of a member that is silent or blocks the others, before the member counts as lost.
    `location_of` returns the location of a member, like `Fleet.location_of`. `wall_clock` supplies the timestamps of
    losses."""

    def __init__(
        self,
        config: EngineConfig,
        host: str = LOOPBACK,
        kill: Kill = no_process,
        location_of: LocationOf = unknown_node,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._channel = ControlSocket(config, host, self._on_message)
        self._dealer = WeightDealer.from_config(config)
        self.registry = MemberRegistry(self._channel, kill, location_of, config.heartbeat_timeout, self._dealer)
        """The live members."""
        self.invitations = tuple(self.registry.invite(slot)[1] for slot in range(config.world_size))
        """The connection information of the first members, in the order of their numbers."""
        self._group = self._begin(0, list(self.registry))
        self._form_seconds = config.rendezvous_timeout
        self._merges: tuple[MergeTiming, ...] = ()
        self._history = LossHistory(wall_clock)
        self._records = RankLogForwarder(self.registry)
        self.registry.subscribe(self._history.on_event)
        self.registry.subscribe(_log)
        self.registry.subscribe(self._on_member_event)
        self._orders = SnapshotRequests(self._channel, self.registry)
        self._is_closed = False

    @property
    def address(self) -> str:
        """The address to which the members connect."""
        return self._channel.address

    @property
    def num_refused(self) -> int:
        """Rejected connections of unauthenticated peers and dropped messages of former members so far."""
        return self._channel.num_refused

    @property
    def num_ignored(self) -> int:
        """Ignored messages so far: messages that a member may not send."""
        return self._channel.num_ignored

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """The hellos of the live members received so far, in the order of the member numbers."""
        return self.registry.hellos

    @property
    def num_ready(self) -> int:
        """Members that have loaded the model."""
        return len(self.registry.loaded())

    @property
    def losses(self) -> tuple[Loss, ...]:
        return self._history.losses

    @property
    def num_lost(self) -> int:
        """Members lost so far."""
        return self._history.num_lost

    def on_process_exit(self, member: int, reason: str) -> None:
        """Report that the process of a member has ended. Thread-safe; may be called at any time."""
        self.registry.report_exit(member, reason)

    @property
    def group(self) -> RankGroup:
        """The ranks of the current epoch, or of the one that is being formed."""
        return self._group

    async def wait_joinable(self) -> None:
        await self.registry.wait_until(
            lambda: any(member.number not in self._group.members for member in self.registry.loaded())
        )

    async def wait_ready(self) -> None:
        await self.registry.wait_until(lambda: not self._history.is_replacing)

    # --- epochs ---

    async def start(self, epoch: int) -> Formation:
        """Wait for the hellos of all members, check that their models are equal, and make them load the model and form
        the epoch.
        """
        members, wait, verdict = list(self.registry), self.registry.wait_until, self._group.verdict
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await wait(lambda: all(member.hello for member in members), verdict)
                Topology(tuple(member.node for member in members)).check(self._config.world_size)
                await check_models(self.hellos, Path(self._config.model))
                self.registry.fix_model()
                self.registry.load(members)
                await wait(lambda: all(member.is_loaded for member in members), verdict)
                return await self._form_first(epoch, members)
        except TimeoutError:
            late = [
                str(number) for number in (self._group.late_members() if self._group.epoch else self._unloaded(members))
            ]
            seconds = human_seconds(self._config.start_timeout)
            raise StartError(f"rank {', '.join(late)} did not start within {seconds}") from None

    async def _form_first(self, epoch: int, members: Sequence[Member]) -> Formation:
        clock = asyncio.get_running_loop().time
        began = clock()
        formation = await self._form_epoch(epoch, members)
        self._form_seconds = max(self._form_seconds, FORM_SHARE * (clock() - began))
        self._records.skip_notes(note for ready in formation.readies for note in ready.notes)
        return formation

    @staticmethod
    def _unloaded(members: Sequence[Member]) -> list[int]:
        return [member.number for member in members if not member.is_loaded]

    async def form(self, epoch: int) -> Formation:
        before, verdict = self._group.members, self._group.verdict
        if self._group.is_suspected:
            await self._group.wait_ended()
        for number in range(epoch, epoch + MAX_ATTEMPTS):
            if number == epoch + MAX_ATTEMPTS // 2:
                self._end_newcomers(before)
            members = in_rank_order(await self._wait_weights(verdict), before)
            try:
                async with asyncio.timeout(self._form_seconds):
                    formation = await self._form_epoch(number, members)
            except TimeoutError:
                await self._attribute_late()
            except LongleafError as error:
                log.warning("cannot form epoch %d: %s", number, error)
            else:
                log.warning("epoch %d: started with %d of %d ranks", number, len(members), self._config.world_size)
                self._publish_joined(formation, before)
                return formation
            verdict = self._group.verdict
        raise Unavailable(f"cannot form an epoch: {MAX_ATTEMPTS} attempts failed")

    def _end_newcomers(self, before: Sequence[int]) -> None:
        """Kill the members that were not in the previous epoch, unless no member of that epoch remains. The remaining
        ones may be able to form an epoch without the newcomers.
        """
        loaded = [member.number for member in self.registry.loaded()]
        if any(number in before for number in loaded):
            for number in set(loaded).difference(before):
                self.registry.kill(number, "every epoch with it failed to form")

    async def _wait_weights(self, verdict: asyncio.Future[EpochEnd]) -> list[Member]:
        """Wait until the members of the next epoch hold all weights, each part once, and return them. Members that read
        for longer than the start timeout are killed. Raises as `_wait_loaded`.
        """
        while True:
            members = await self._wait_loaded(verdict)
            if self._dealer is None:
                return members
            try:
                async with asyncio.timeout(self._config.start_timeout):
                    if await self.registry.hold_parts(members):
                        return members
            except TimeoutError:
                seconds = human_seconds(self._config.start_timeout)
                for member in members:
                    if member.is_reading:
                        self.registry.kill(member.number, f"did not read its part of the weights within {seconds}")

    async def _wait_loaded(self, verdict: asyncio.Future[EpochEnd]) -> list[Member]:
        """Wait until all pending kills have finished and at least one member has loaded the model; with sharded weights
        as many as have room for all parts. Return the members that can join the next epoch. Raises the verdict of the
        previous epoch if there are none or too few, and no replacement is pending.
        """
        registry = self.registry
        await registry.wait_killed()
        await registry.wait_until(lambda: self._is_complete or not (self._is_changing or self._history.is_replacing))
        if not self._is_complete:
            raise (await asyncio.shield(verdict)).error
        return registry.loaded()

    @property
    def _is_complete(self) -> bool:
        """Whether the loaded members have room for all weights."""
        return len(self.registry.loaded()) >= (self._dealer.min_ranks if self._dealer is not None else 1)

    @property
    def missing_weights(self) -> float:
        """The fraction of the weights that no loaded member holds."""
        if self._dealer is None:
            return 0.0
        present = NO_PARTS.union(*(member.parts for member in self.registry.loaded() if not member.is_reading))
        return 1 - len(present) / NUM_PARTS

    @property
    def _is_changing(self) -> bool:
        """Whether a member has not loaded the model yet, or is being killed."""
        return any(not member.is_loaded or member.loss_reason for member in self.registry)

    def _begin(self, epoch: int, members: Sequence[Member]) -> RankGroup:
        self._group = RankGroup(epoch, members, self._config, self._channel, self.registry)
        self.registry.begin_epoch(epoch, self._group.members)
        return self._group

    async def _form_epoch(self, epoch: int, members: Sequence[Member]) -> Formation:
        """Form an epoch of these members. Raises the error that ended it."""
        formation = await self._begin(epoch, members).form(members, self._merges)
        self._merges = self._merges or formation.readies[0].merges
        for member in members:
            member.num_late = 0
        self.registry.drop_surplus(members)
        return formation

    async def _attribute_late(self) -> None:
        """End an epoch that did not form in time, and kill members that were late MAX_LATE times in a row. A member
        that aborts the epoch within ANSWER_SECONDS does not count as late: it was waiting for another member.

        With sharded weights, the next epoch may order a member to read weights first, for which it has much more time
        than to join. So a member that hangs is killed before.
        """
        group = self._group
        seconds = human_seconds(self._form_seconds)
        group.conclude(GroupFailed(f"epoch {group.epoch} did not form within {seconds}"))
        late = await self._late_members(group, ANSWER_SECONDS)
        for member in late:
            member.num_late += 1
            if member.num_late >= MAX_LATE:
                self.registry.kill(member.number, f"did not join {MAX_LATE} epochs in time")
        if late and self._dealer is not None:
            for member in await self._late_members(group, self._form_seconds):
                self.registry.kill(member.number, f"did not leave epoch {group.epoch} within {seconds}")

    async def _late_members(self, group: RankGroup, seconds: float) -> list[Member]:
        """The members for which the others wait after so many seconds. Empty if all are late: the cause is unknown."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.registry.wait_until(lambda: not group.late_members())
        if len(late := group.late_members()) == group.num_requested > 1:
            return []
        return [member for number in late if (member := self.registry.get(number)) is not None]

    def _publish_joined(self, formation: Formation, before: Sequence[int]) -> None:
        for rank, hello in enumerate(formation.hellos):
            if hello.member not in before:
                self.registry.publish(MemberJoined(hello.member, rank, hello.node, formation.epoch))

    # --- outside the steps ---

    async def save(self, member: int, order: Save) -> Saved:
        return await self._orders.save(member, order)

    async def fetch(self, member: int, order: Fetch) -> None:
        await self._orders.fetch(member, order)

    async def discard(self, member: int, tickets: Sequence[int]) -> None:
        self._channel.send([member], Discard(tuple(tickets)))

    # --- receive ---

    def _on_message(self, number: int, message: FromRank) -> None:
        """Handle a message of a member. Raises ValueError for a message that the member may not send."""
        member = self.registry.get(number)
        assert member is not None  # the channel drops messages of members that are not in the registry
        match message:
            case StepResult():
                self._group.on_step_result(number, message)
                return
            case Logged():
                self._records.log_records(member, message)
                return
            case Hello() | Loaded() | WeightsReady() | Heartbeat():
                member.on_message(message)
            case Saved() | Fetched():
                self._orders.on_outcome(message)
            case StoreOpened() | Ready():
                self._group.on_rendezvous(message)
            case GroupFailure():
                self._group.on_group_failure(message)
            case Died():
                self._group.check_blamed(message)
                self.registry.remove_lost(number, message.reason, message)
        member.num_missed_heartbeats = 0
        self.registry.notify_waiters()

    def _on_member_event(self, event: MemberEvent) -> None:
        if isinstance(event, MemberLost):
            self._group.on_member_lost(event.member, event.reason, event.report)

    # --- close ---

    async def close(self) -> None:
        """Order the members to exit. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._orders.close()
            await self.registry.close()
            await self._channel.close()
