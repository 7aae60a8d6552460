"""The times at which a rank begins and answers steps, on a device whose completion the test controls, and the epochs
that it joins and leaves."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from longleaf.config import EngineConfig
from longleaf.errors import ExchangeAborted, ModelRefused, RankLost
from longleaf.rank_protocol.group_messages import GroupFailure, Join, KvLayout, OpenStore, Ready, StoreOpened
from longleaf.rank_protocol.member_messages import Hello, Load, MemberProgress, Stop
from longleaf.rank_protocol.snapshots import Discard, Fetch, Fetched, Order, Outcome, Save
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan, StepResult
from tests.support.threads import make_spec
from workers.member_process import MemberProcess, MemberStatus
from workers.rank_runtime import StepHandle, done

PLAN = Decode(())
CHUNK = Prefill((0,), 0, (1,), ())


class ScriptedChannel:
    """Messages in order; some are preceded by a number of polls without a message."""

    def __init__(self, log: list, *messages: object) -> None:
        self._messages = deque(messages)
        self._log = log

    @property
    def has_message(self) -> bool:
        if isinstance(self._messages[0], int):
            self._messages[0] -= 1
            if not self._messages[0]:
                self._messages.popleft()
            return False
        return True

    def receive(self) -> object:
        while isinstance(self._messages[0], int):  # blocks if nothing is in flight
            self._messages.popleft()
        if callable(self._messages[0]):  # something that happens elsewhere meanwhile
            self._messages.popleft()()
            return self.receive()
        return self._messages.popleft()

    def send(self, message: object) -> None:
        match message:
            case StepResult():
                self._log.append(("answer", message.step))
            case Ready() | StoreOpened():
                self._log.append((type(message).__name__.lower(), message.epoch))
            case GroupFailure():
                self._log.append(("broken", message.epoch, message.step, message.reason, message.blamed))


class ScriptedRank:
    """A device that completes a step after this number of polls; with None, only in a blocking wait. `errors` are
    raised by action: the number of a step, `join`, `leave` or another name."""

    num_exchanges = 0

    def __init__(self, log: list, looks: int | None, rank: int = 0, errors: dict | None = None) -> None:
        self._log = log
        self._looks = looks
        self._rank = rank
        self._errors = errors or {}

    def _do(self, *deed: object) -> None:
        self._log.append(deed)
        if error := self._errors.get(deed[1] if deed[0] == "end" else deed[0]):
            raise error

    def make_hello(self) -> Hello:
        return Hello(self._rank, "here", "127.0.0.1", 1)

    def load(self, parts: Sequence[int] = ()) -> None:
        pass

    def hold(self, parts: Sequence[int]) -> int:
        self._do("hold", *parts)
        return len(parts)

    def open_store(self) -> int:
        self._do("open")
        return 0

    def join(self, join: Join) -> Ready:
        self._do("join", join.epoch)
        return Ready(self._rank, "cpu", "float32", 8, 64, epoch=join.epoch)

    def set_layout(self, layout: KvLayout) -> None:
        self._do("set_layout", layout.epoch)

    def leave(self) -> None:
        self._do("leave")

    def fence(self) -> None:
        self._do("fence")

    def close(self) -> None:
        pass

    def submit_order(self, order: Order, answer: Callable[[Outcome], None]) -> None:
        self._do(type(order).__name__.lower(), *(order.tickets if isinstance(order, Discard) else [order.ticket]))
        if isinstance(order, Fetch):
            answer(Fetched(self._rank, order.ticket))

    def start(self, plan: StepPlan) -> StepHandle:
        self._log.append(("begin", plan.step))
        looks = deque(range(self._looks or 0))

        def is_done() -> bool:
            if looks:
                looks.popleft()
            return self._looks is not None and not looks

        def finish() -> StepResult | None:
            self._do("end", plan.step)
            return StepResult(plan.epoch, plan.step, {}) if self._rank == 0 else None

        return StepHandle(is_done, finish)


def plan(step: int, work: Decode | Prefill = PLAN, epoch: int = 1, **released: tuple[int, ...]) -> StepPlan:
    return StepPlan(epoch, step, work, **released)


def join(epoch: int, rank: int = 0) -> Join:
    return Join(epoch, rank, "", 0, ("here", "here"))


def run_member(log: list, *messages: object, status: MemberStatus | None = None, **how: object) -> list:
    """The actions and the messages sent, in `log`."""
    spec = make_spec(0, EngineConfig(model="none", world_size=2))
    channel = ScriptedChannel(log, Load(), *messages, Stop())
    rank = ScriptedRank(log, **{"looks": 0, **how})
    MemberProcess(
        spec, rank, channel, status or MemberStatus(), lambda outcome: log.append(("told", outcome.ticket))
    ).run()
    return log


def run_epoch(*messages: object, looks: int | None = None, rank: int = 0) -> list:
    """The actions and the messages sent after an epoch is joined."""
    log = run_member([], join(1, rank), *messages, looks=looks, rank=rank)
    assert log[:2] == [("join", 1), ("ready", 1)]
    return log[2:]


def of(step: int) -> list:
    return [("end", step), ("answer", step)]


def test_next_step_begins_before_the_previous_result():
    log = run_epoch(plan(1), plan(2), plan(3))
    assert log == [("begin", 1), ("begin", 2), *of(1), ("begin", 3), *of(2)]


def test_completed_step_is_answered_immediately():
    log = run_epoch(plan(1), plan(2), looks=0)
    assert log == [("begin", 1), *of(1), ("begin", 2), *of(2)]


def test_step_completed_while_idle_is_answered():
    log = run_epoch(plan(1), 50, plan(2), 50, looks=20)
    assert log == [("begin", 1), *of(1), ("begin", 2), *of(2)]


def test_plan_received_while_the_device_is_busy_is_started():
    log = run_epoch(plan(1), 5, plan(2), 50, looks=20)
    assert log == [("begin", 1), ("begin", 2), *of(1), *of(2)]


@pytest.mark.parametrize("late", [plan(2, CHUNK), plan(2, release_sequences=(7,))])
def test_chunks_and_releases_wait_for_the_result(late):
    assert run_epoch(plan(1), late, plan(3)) == [("begin", 1), *of(1), ("begin", 2), ("begin", 3), *of(2)]


def test_other_ranks_wait_and_send_no_results():
    log = run_epoch(plan(1), plan(2), plan(3), rank=1)
    assert log == [("begin", 1), ("begin", 2), ("end", 1), ("begin", 3), ("end", 2)]


def test_result_is_created_once():
    made = []
    pending = StepHandle(lambda: False, lambda: made.append(1))
    assert not pending.is_done
    assert pending.result() is pending.result() is None
    assert pending.is_done
    assert made == [1]
    assert done(None).is_done


JOINED, LEFT = [("join", 1), ("ready", 1)], [("leave",)]
AGAIN = [("join", 2), ("ready", 2)]


def test_error_in_a_step_ends_the_epoch_but_not_the_member():
    """Plans that were sent before the coordinator learned of the error are not executed."""
    errors = {2: RankLost(1, "died")}
    late = (plan(3), plan(4), KvLayout(1, ()), OpenStore(1), join(1))
    log = run_member([], join(1), plan(1), plan(2), *late, join(2), plan(5), plan(6, epoch=2), errors=errors)
    broken = [("begin", 2), ("end", 2), ("broken", 1, 2, "died", 1), *LEFT]
    assert log == [*JOINED, ("begin", 1), *of(1), *broken, *AGAIN, ("begin", 6), *of(6)]


def test_failed_step_is_reported_after_the_next_one_began():
    log = run_member([], join(1), plan(1), plan(2), errors={1: ValueError("no")}, looks=None)
    assert log == [*JOINED, ("begin", 1), ("begin", 2), ("end", 1), ("broken", 1, 1, "ValueError: no", None), *LEFT]


def test_steps_in_flight_at_the_end_of_an_epoch_have_no_result():
    log = run_member([], join(1), plan(1), join(2), plan(2, epoch=2), 1, looks=None)
    assert log == [*JOINED, ("begin", 1), *LEFT, *AGAIN, ("begin", 2)]


def test_failed_join_is_reported_and_the_next_epoch_is_joined():
    rank_errors: dict = {"join": RuntimeError("no peer joined")}
    log = run_member([], join(1), join(1), rank_errors.clear, plan(1), join(2), errors=rank_errors)
    assert log == [("join", 1), ("broken", 1, 0, "RuntimeError: no peer joined", None), *LEFT, *AGAIN]


def test_member_ends_after_two_failures_of_its_own():
    log: list = []
    with pytest.raises(OSError, match="no room"):
        run_member(log, join(1), join(2), errors={"join": OSError("no room")})
    assert log == [("join", 1), ("broken", 1, 0, "OSError: no room", None), *LEFT, ("join", 2)]


def test_store_is_opened_before_its_epoch_is_joined():
    log = run_member([], OpenStore(1), join(1), OpenStore(2), join(2))
    opened = [[("open",), ("storeopened", epoch)] for epoch in (1, 2)]
    assert log == [*opened[0], *JOINED, *LEFT, *opened[1], *AGAIN]


@pytest.mark.parametrize(
    ("errors", "raised"),
    [({"leave": RuntimeError("stuck"), 1: ValueError()}, RuntimeError), ({1: ModelRefused("bad")}, ModelRefused)],
)
def test_member_that_cannot_leave_or_compute_ends(errors, raised):
    with pytest.raises(raised):
        run_member([], join(1), plan(1), errors=errors)


def test_layout_applies_to_its_epoch():
    log = run_member([], join(2), KvLayout(1, ()), KvLayout(2, ()), plan(1, epoch=2))
    assert log == [*AGAIN, ("set_layout", 2), ("begin", 1), *of(1)]


def test_epoch_that_has_ended_is_not_joined():
    status, log = MemberStatus(), []
    run_member(log, lambda: status.fence(2), join(1), join(2), plan(1, epoch=2), join(3), status=status)
    assert log == [("join", 3), ("ready", 3)]


def test_device_error_after_the_end_of_its_epoch_is_ignored():
    """A rank that is released from an exchange continues as if data had arrived."""
    status, log = MemberStatus(), []
    fence = lambda: status.fence(1)  # noqa: E731
    run_member(log, join(1), plan(1), fence, plan(2), join(2), status=status, looks=None)
    freed = [("fence",), ("begin", 2), ("end", 1), ("broken", 1, 1, "epoch 1 was ended", None), *LEFT]
    assert log == [*JOINED, ("begin", 1), *freed, *AGAIN]


def test_heartbeat_reports_progress():
    status, log, seen = MemberStatus(), [], []
    rank = ScriptedRank(log, None)
    status.fence(1)
    with pytest.raises(ExchangeAborted):
        status.enter_epoch(1, rank)
    for deed in (lambda: status.enter_epoch(2, rank), lambda: status.begin_step(2, 5, rank), status.leave_epoch):
        deed()
        rank.num_exchanges += 7
        seen.append(status.progress)
    assert seen == [MemberProgress(2, 0, 7), MemberProgress(2, 5, 7), MemberProgress()]


SAVE, FETCH = Save(1, "a", 0, ()), Fetch(2, "b", 0, "", ())


def test_storage_requests_are_forwarded_between_steps():
    log = run_epoch(plan(1), SAVE, FETCH, plan(2), Discard((2,)), looks=None)
    orders = [("save", 1), ("fetch", 2), ("told", 2)]
    assert log == [("begin", 1), *orders, ("begin", 2), *of(1), ("discard", 2)]


def test_member_outside_an_epoch_accepts_storage_requests():
    log = run_member([], FETCH, join(1), plan(1), SAVE, errors={1: RankLost(1, "died")})
    left = [("end", 1), ("broken", 1, 1, "died", 1), *LEFT]
    assert log == [("fetch", 2), ("told", 2), *JOINED, ("begin", 1), *left, ("save", 1)]
