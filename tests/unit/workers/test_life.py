"""When a rank begins steps and when it answers them, with a device that is done whenever the test says so."""

from collections import deque

import pytest

from longleaf.channel.lives import Join, Ready, Stop
from longleaf.channel.step import Decode, Prefill, StepPlan, StepResult
from longleaf.config import EngineConfig
from tests.support.threads import make_spec
from workers.control import Life
from workers.pending import Pending, done

PLAN = Decode(())
CHUNK = Prefill((0,), 0, (1,), ())


class ScriptedChannel:
    """Messages that come in their order; before some of them so many looks find none."""

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
        while isinstance(self._messages[0], int):  # who has nothing under way waits
            self._messages.popleft()
        return self._messages.popleft()

    def send(self, message: object) -> None:
        if isinstance(message, StepResult):
            self._log.append(("answer", message.step))


class ScriptedRank:
    """A device that is done with a step after so many looks; None: only when it is waited for."""

    def __init__(self, log: list, looks: int | None, rank: int = 0) -> None:
        self._log = log
        self._looks = looks
        self._rank = rank

    def open_store(self) -> int:
        return 0

    def load(self) -> None:
        pass

    def join(self, join: Join) -> Ready:
        return Ready(self._rank, "cpu", "float32", 8, 64)

    def close(self) -> None:
        pass

    def start(self, plan: StepPlan) -> Pending:
        self._log.append(("begin", plan.step))
        looks = deque(range(self._looks or 0))

        def is_done() -> bool:
            if looks:
                looks.popleft()
            return self._looks is not None and not looks

        def finish() -> StepResult | None:
            self._log.append(("end", plan.step))
            return StepResult(plan.epoch, plan.step, {}) if self._rank == 0 else None

        return Pending(is_done, finish)


def plan(step: int, work: Decode | Prefill = PLAN, **released: tuple[int, ...]) -> StepPlan:
    return StepPlan(1, step, work, **released)


def lived(*messages: object, looks: int | None = None, rank: int = 0) -> list:
    log: list = []
    spec = make_spec(rank, EngineConfig(model="none", world_size=2))
    channel = ScriptedChannel(log, Join(1, "", 0, ("here", "here")), *messages, Stop())
    Life(spec, ScriptedRank(log, looks, rank), channel).run()
    return log


def of(step: int) -> list:
    return [("end", step), ("answer", step)]


def test_a_step_is_begun_before_the_one_before_it_is_answered():
    log = lived(plan(1), plan(2), plan(3))
    assert log == [("begin", 1), ("begin", 2), *of(1), ("begin", 3), *of(2)]


def test_what_is_done_at_once_is_answered_at_once():
    log = lived(plan(1), plan(2), looks=0)
    assert log == [("begin", 1), *of(1), ("begin", 2), *of(2)]


def test_what_is_done_while_nothing_comes_is_answered():
    log = lived(plan(1), 50, plan(2), 50, looks=20)
    assert log == [("begin", 1), *of(1), ("begin", 2), *of(2)]


def test_what_comes_while_the_device_is_busy_is_begun():
    log = lived(plan(1), 5, plan(2), 50, looks=20)
    assert log == [("begin", 1), ("begin", 2), *of(1), *of(2)]


@pytest.mark.parametrize("late", [plan(2, CHUNK), plan(2, release_sequences=(7,))])
def test_chunks_and_releases_wait_for_the_answer(late):
    assert lived(plan(1), late, plan(3)) == [("begin", 1), *of(1), ("begin", 2), ("begin", 3), *of(2)]


def test_other_ranks_wait_as_much_and_say_nothing():
    log = lived(plan(1), plan(2), plan(3), rank=1)
    assert log == [("begin", 1), ("begin", 2), ("end", 1), ("begin", 3), ("end", 2)]


def test_a_result_is_made_once():
    made = []
    pending = Pending(lambda: False, lambda: made.append(1))
    assert not pending.is_done
    assert pending.result() is pending.result() is None
    assert pending.is_done
    assert made == [1]
    assert done(None).is_done
