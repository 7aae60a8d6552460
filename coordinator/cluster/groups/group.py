"""The ranks of one epoch over the control channel, from the rendezvous until the end of the epoch."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.cluster.control_socket import ControlSocket
from coordinator.cluster.groups.failure_attribution import FailureCollector
from coordinator.cluster.groups.rendezvous import Rendezvous
from coordinator.cluster.member import Member
from coordinator.cluster.member_registry import MemberRegistry
from coordinator.cluster.ports import EpochEnd, Formation
from longleaf.config import EngineConfig
from longleaf.errors import GroupFailed, LongleafError, StartError
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.group_messages import (
    AbortExchanges,
    GroupFailure,
    Join,
    KvLayout,
    MergeTiming,
    OpenStore,
    Ready,
    StoreOpened,
)
from longleaf.rank_protocol.member_messages import Died
from longleaf.rank_protocol.step import StepPlan, StepResult


class PendingStep(NamedTuple):
    """A step that was sent and is not answered yet."""

    result: asyncio.Future[StepResult]
    seconds: float
    """The time limit."""


class RankGroup:
    """The ranks of epoch `epoch`; `members` are in rank order. Epoch 0 precedes the first epoch that is formed: it
    consists of the members that will form it, and only records their losses. Needs a running event loop.
    """

    def __init__(
        self,
        epoch: int,
        members: Sequence[Member],
        config: EngineConfig,
        channel: ControlSocket,
        registry: MemberRegistry,
    ) -> None:
        self.epoch = epoch
        self.members = tuple(member.number for member in members)
        self._config = config
        self._channel = channel
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, PendingStep] = {}
        """By step number, in the order of sending. Answers to any other step are dropped."""
        self._deadline: asyncio.TimerHandle | None = None
        """The timer for the first pending step."""
        self._failures = FailureCollector(self.members, registry.kill, self._unanswered)
        self.verdict.add_done_callback(lambda _: self._end_steps())
        self._rendezvous = Rendezvous(epoch, self.members)
        self._is_fenced = False
        for member in members:
            if member.loss_reason:
                self.on_member_lost(member.number, member.loss_reason)

    @property
    def verdict(self) -> asyncio.Future[EpochEnd]:
        """The reason why the epoch ended, once it has."""
        return self._failures.verdict

    @property
    def is_suspected(self) -> bool:
        """Whether the verdict exists or is being determined."""
        return self._failures.is_suspected

    async def wait_ended(self) -> EpochEnd:
        """Wait until the epoch ends, whether in a step or between steps. May be cancelled."""
        return await asyncio.shield(self.verdict)

    # --- rendezvous ---

    async def form(self, members: Sequence[Member], merges: tuple[MergeTiming, ...]) -> Formation:
        """Send the rendezvous address to the members, and wait until all are ready. Raises the error that ended the
        epoch.
        """
        hellos = tuple(member.hello for member in members if member.hello is not None)
        rendezvous, wait = self._rendezvous, self._registry.wait_until
        if len(members) > 1:
            self._channel.send(self.members[:1], OpenStore(self.epoch))
            await wait(lambda: rendezvous.port is not None, self.verdict)
        nodes = tuple(hello.node for hello in hellos)
        for rank, member in enumerate(self.members):
            join = Join(self.epoch, rank, hellos[0].host, rendezvous.port or 0, nodes, merges)
            self._channel.send([member], join)
        await wait(lambda: rendezvous.is_complete, self.verdict)
        readies = tuple(rendezvous.readies[member] for member in self.members)
        return Formation(self.epoch, hellos, readies, self)

    def late_members(self) -> list[int]:
        """Return the live members that the others wait for: they are not ready and have not aborted the epoch."""
        requested = self.members if self._rendezvous.port is not None else self.members[:1]
        missing = [
            one for one in requested if one not in self._rendezvous.readies and not self._failures.has_answered(one)
        ]
        return [one for one in missing if self._registry.get(one) is not None]

    @property
    def num_requested(self) -> int:
        """Members that were sent an order for this epoch."""
        return len(self.members) if self._rendezvous.port is not None else 1

    # --- steps ---

    async def send_layout(self, layout: KvLayout) -> None:
        """Send the KV cache layout to the ranks, before the first plan. Raises the error that ended the epoch."""
        if self.is_suspected:
            raise (await self.wait_ended()).error
        self._channel.send(self.members, layout)

    def step(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Send the plan to every rank immediately. The future holds the answer of rank 0, or the error that ended the
        epoch. Steps may be sent before earlier ones are answered; they run in the order of the calls.

        The deadline starts with the answer to the previous plan, because the ranks begin the step only then.
        """
        self._channel.send(self.members, plan)
        # The plain reference attention does the work of all ranks on a single rank, and does it twice in 16-bit types.
        num_tokens = plan.num_tokens + 2 * plan.num_reference * len(self.members)
        seconds = self._config.step_timeout + num_tokens * self._config.step_timeout_per_token
        under_way = self._under_way[plan.step] = PendingStep(self._loop.create_future(), seconds)
        under_way.result.add_done_callback(lambda _: self._remove_step(plan.step))
        if self.verdict.done():
            self._end_steps()
        elif len(self._under_way) == 1:
            self._start_deadline(plan.step, under_way)
        return under_way.result

    def _start_deadline(self, step: int, under_way: PendingStep) -> None:
        """Start the deadline of a step."""
        self._deadline = self._loop.call_later(under_way.seconds, self._on_deadline, step, under_way)

    def _on_deadline(self, step: int, under_way: PendingStep) -> None:
        self._registry.run_in_background(self._end_slow_step(step, under_way))

    def _remove_step(self, step: int) -> None:
        """Remove a step that was answered or cancelled, and start the deadline of the next one."""
        del self._under_way[step]
        if self._deadline is not None:
            self._deadline.cancel()
        for following in self._under_way.items():
            self._start_deadline(*following)
            break

    def _end_steps(self) -> None:
        """Fail all pending steps with the verdict of the epoch."""
        for result, _ in self._under_way.values():
            if not result.done():
                result.set_exception(self.verdict.result().error)

    async def _end_slow_step(self, step: int, under_way: PendingStep) -> None:
        """Kill the member that blocks the others. If no single member does, end the epoch."""

        def is_over() -> bool:
            return under_way.result.done() or self.is_suspected

        behind = await self._registry.heartbeats.find_straggler(self.members, is_over)
        if is_over():
            return
        reason = f"step {step} exceeded its limit of {human_seconds(under_way.seconds)}"
        if behind is None:
            self.conclude(GroupFailed(reason), (step,))
        else:
            self._failures.record_slow_step(step)
            self._registry.kill(behind.number, reason)

    def _unanswered(self) -> tuple[int, ...]:
        return tuple(step for step, under_way in self._under_way.items() if not under_way.result.done())

    # --- messages of members ---

    def on_step_result(self, member: int, message: StepResult) -> None:
        """Handle the result of a step. Raises ValueError if the sender is not rank 0."""
        if member != self.members[0]:
            raise ValueError(f"invalid message from member {member}: {type(message).__name__} is for rank 0")
        under_way = self._under_way.get(message.step)
        if message.epoch == self.epoch and under_way is not None and not (under_way.result.done() or self.is_suspected):
            under_way.result.set_result(message)

    def on_rendezvous(self, message: StoreOpened | Ready) -> None:
        """Handle a rendezvous message. Raises ValueError for a message of another epoch, or a repeated one."""
        self._rendezvous.on_message(message)

    def on_group_failure(self, message: GroupFailure) -> None:
        """Handle a group failure that a member reports. A failure of an earlier epoch is ignored. Raises ValueError for
        an impossible message.
        """
        is_ours = message.epoch == self.epoch > 0
        if message.epoch > self.epoch or (message.epoch == self.epoch and not (is_ours and self._has(message))):
            raise ValueError(f"invalid message from member {message.member}: GroupFailure of another epoch")
        if is_ours:
            self.check_blamed(message)
            self._failures.record_group_failure(message.member, message.step, message.reason, message.blamed)
            self._fence()

    def _has(self, message: GroupFailure | Died) -> bool:
        return message.member in self.members

    def check_blamed(self, message: GroupFailure | Died) -> None:
        """Raises ValueError if the message blames a rank that does not exist."""
        if not 0 <= (message.blamed or 0) < len(self.members):
            raise ValueError(f"invalid message from member {message.member}: it blames rank {message.blamed}")

    # --- end ---

    def on_member_lost(self, member: int, reason: str, report: Died | None = None) -> None:
        """Record the loss of a member; `report` is its own report of its end, if it sent one."""
        described = reason + self._registry.location_of(member)
        if report is None:
            self._failures.record_exit(member, described)
        else:
            if report.refused and self._has(report):
                self._failures.conclude(StartError(reason))
            self._failures.record_failure(member, described, report.blamed)
        self._fence()

    def conclude(self, error: LongleafError, steps: tuple[int, ...] = ()) -> None:
        """End the epoch, unless it has ended."""
        self._failures.conclude(error, steps)
        self._fence()

    def _fence(self) -> None:
        """Notify all ranks once that the epoch has ended early, so that no rank keeps waiting for another."""
        if self.is_suspected and not self._is_fenced and self.epoch:
            self._is_fenced = True
            self._channel.send(self.members, AbortExchanges(self.epoch))
        self._registry.notify_waiters()
