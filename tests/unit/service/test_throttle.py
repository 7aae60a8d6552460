"""The rate limit for log lines."""

import pytest

from coordinator.throttle import Throttle


class FakeClock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_one_event_per_interval_is_admitted(clock: FakeClock) -> None:
    throttle = Throttle(60.0, clock=clock)
    admitted = list[float]()
    for clock.now in (5.0, 6.0, 64.9, 65.0, 124.0, 200.0, 259.0):
        if throttle.admit():
            admitted.append(clock.now)
    assert admitted == [5.0, 65.0, 200.0]


def test_burst_refills_at_the_rate(clock: FakeClock) -> None:
    throttle = Throttle(0.5, 4, clock)

    def num_admitted() -> int:
        return sum(throttle.admit() for _ in range(10))

    assert num_admitted() == 4
    clock.now = 0.4
    assert num_admitted() == 0
    clock.now = 1.0
    assert num_admitted() == 2
    clock.now = 1e6
    assert num_admitted() == 4, "unused events do not accumulate"


def test_dropped_events_are_counted(clock: FakeClock) -> None:
    throttle = Throttle(1.0, clock=clock)
    for _ in range(4):
        throttle.admit()
    throttle.num_dropped += 7
    assert throttle.pop_num_dropped() == 10
    assert throttle.pop_num_dropped() == 0
