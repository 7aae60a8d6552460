"""The ranks of one epoch over the control channel: from when they are told where to meet until it ends."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.cluster.control_socket import ControlSocket
from coordinator.cluster.groups.failure_attribution import FailureCollector
from coordinator.cluster.groups.rendezvous import Rendezvous
from coordinator.cluster.member_registry import Member, MemberRegistry
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
    """A step that was sent."""

    result: asyncio.Future[StepResult]
    seconds: float
    """That it may take."""


class RankGroup:
    """Epoch `epoch` of members in rank order; epoch 0, before the first one, is of those who will form that, and does
    nothing but see them lost. Needs a running event loop."""

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
        self._roster = registry
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, PendingStep] = {}
        """By the number of a step, in their order: an answer to any other is dropped."""
        self._deadline: asyncio.TimerHandle | None = None
        """When the first of these must be answered."""
        self._losses = FailureCollector(self.members, registry.end, self._unanswered)
        self.verdict.add_done_callback(lambda _: self._end_steps())
        self._meeting = Rendezvous(epoch, self.members)
        self._is_fenced = False
        for member in members:
            if member.end:
                self.died(member.number, member.end)

    @property
    def verdict(self) -> asyncio.Future[EpochEnd]:
        """Why the epoch is over, once it is."""
        return self._losses.verdict

    @property
    def is_suspected(self) -> bool:
        """The verdict is there, or on its way."""
        return self._losses.is_suspected

    async def wait_ended(self) -> EpochEnd:
        return await asyncio.shield(self.verdict)

    # --- meet ---

    async def meet(self, members: Sequence[Member], merges: tuple[MergeTiming, ...]) -> Formation:
        """Tells the members where they meet, and waits until they have. Raises what ended the epoch."""
        hellos = tuple(member.hello for member in members if member.hello is not None)
        rendezvous, wait = self._meeting, self._roster.wait
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

    def late(self) -> list[int]:
        """Members that the others wait for: they have neither come nor given the epoch up."""
        requested = self.members if self._meeting.port is not None else self.members[:1]
        missing = [one for one in requested if one not in self._meeting.readies and not self._losses.has_answered(one)]
        return [one for one in missing if self._roster.get(one) is not None]

    @property
    def num_asked(self) -> int:
        """Members that were told what to do for this epoch."""
        return len(self.members) if self._meeting.port is not None else 1

    # --- work ---

    async def lay_out(self, layout: KvLayout) -> None:
        if self.is_suspected:
            raise (await self.wait_ended()).error
        self._channel.send(self.members, layout)

    def step(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Sends the plan to every rank, at once; rank 0's answer, or what ended the epoch.

        Its deadline counts from the answer to the plan before it: only then do the ranks begin.
        """
        self._channel.send(self.members, plan)
        # Plain attention computes on one rank what the step shares, and in coarse types twice.
        num_tokens = plan.num_tokens + 2 * plan.num_reference * len(self.members)
        seconds = self._config.step_timeout + num_tokens * self._config.step_timeout_per_token
        under_way = self._under_way[plan.step] = PendingStep(self._loop.create_future(), seconds)
        under_way.result.add_done_callback(lambda _: self._forget(plan.step))
        if self.verdict.done():
            self._end_steps()
        elif len(self._under_way) == 1:
            self._begin(plan.step, under_way)
        return under_way.result

    def _begin(self, step: int, under_way: PendingStep) -> None:
        """The ranks begin a step."""
        self._deadline = self._loop.call_later(under_way.seconds, self._is_late, step, under_way)

    def _is_late(self, step: int, under_way: PendingStep) -> None:
        self._roster.run(self._blame_slow(step, under_way))

    def _forget(self, step: int) -> None:
        """A step is answered, or nobody waits for that any more."""
        del self._under_way[step]
        if self._deadline is not None:
            self._deadline.cancel()
        for following in self._under_way.items():
            self._begin(*following)
            break

    def _end_steps(self) -> None:
        """The epoch is over, and with it the steps."""
        for result, _ in self._under_way.values():
            if not result.done():
                result.set_exception(self.verdict.result().error)

    async def _blame_slow(self, step: int, under_way: PendingStep) -> None:
        """Kills who holds up the others; when nobody does, all give up the epoch."""

        def is_over() -> bool:
            return under_way.result.done() or self.is_suspected

        behind = await self._roster.find_behind(self.members, is_over)
        if is_over():
            return
        reason = f"step {step} took longer than its {human_seconds(under_way.seconds)}"
        if behind is None:
            self.conclude(GroupFailed(reason), (step,))
        else:
            self._losses.step = step
            self._roster.end(behind.number, reason)

    def _unanswered(self) -> tuple[int, ...]:
        return tuple(step for step, under_way in self._under_way.items() if not under_way.result.done())

    # --- what members say ---

    def take_result(self, member: int, message: StepResult) -> None:
        """Raises ValueError for who is not rank 0."""
        if member != self.members[0]:
            raise ValueError(f"member {member} sends what it may not: {type(message).__name__} for rank 0")
        under_way = self._under_way.get(message.step)
        if message.epoch == self.epoch and under_way is not None and not (under_way.result.done() or self.is_suspected):
            under_way.result.set_result(message)

    def take_meeting(self, message: StoreOpened | Ready) -> None:
        """Raises ValueError for what belongs to another epoch, or was said before."""
        self._meeting.take(message)

    def take_broken(self, message: GroupFailure) -> None:
        """One of an epoch before tells nothing new. Raises ValueError for what cannot be."""
        is_ours = message.epoch == self.epoch > 0
        if message.epoch > self.epoch or (message.epoch == self.epoch and not (is_ours and self._has(message))):
            raise ValueError(f"member {message.member} sends what it may not: Broken of another epoch")
        if is_ours:
            self._check_blamed(message)
            self._losses.broken(message.member, message.step, message.reason, message.blamed)
            self._fence()

    def take_death(self, message: Died) -> None:
        """Raises ValueError for what cannot be."""
        self._check_blamed(message)
        if message.refused and self._has(message):
            self._losses.conclude(StartError(message.reason))
        self._losses.failed(message.member, message.reason + self._roster.where(message.member), message.blamed)
        self._fence()

    def _has(self, message: GroupFailure | Died) -> bool:
        return message.member in self.members

    def _check_blamed(self, message: GroupFailure | Died) -> None:
        if not 0 <= (message.blamed or 0) < len(self.members):
            raise ValueError(f"member {message.member} sends what it may not: blame for rank {message.blamed}")

    # --- end ---

    def died(self, member: int, reason: str) -> None:
        """A member's process has ended."""
        self._losses.died(member, reason + self._roster.where(member))
        self._fence()

    def conclude(self, error: LongleafError, steps: tuple[int, ...] = ()) -> None:
        """Ends the epoch, unless it has ended."""
        self._losses.conclude(error, steps)
        self._fence()

    def _fence(self) -> None:
        """Tells all ranks of an epoch that has ended before its time, once: whoever waits there for another one must
        not any more."""
        if self.is_suspected and not self._is_fenced and self.epoch:
            self._is_fenced = True
            self._channel.send(self.members, AbortExchanges(self.epoch))
        self._roster.note_change()
