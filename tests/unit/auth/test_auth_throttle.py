"""The delay after failed authentication attempts."""

from coordinator.auth.auth_throttle import FREE_PER_SECOND, MAX_WAITING, WAIT_SECONDS, AuthFailureThrottle
from tests.unit.auth.test_credentials import Clock


def test_first_failures_are_immediate_and_a_flood_is_delayed() -> None:
    clock = Clock()
    clock.now = 10.0
    refusals = AuthFailureThrottle(clock)
    assert [refusals.note() for _ in range(FREE_PER_SECOND)] == [0.0] * FREE_PER_SECOND
    assert refusals.note() == WAIT_SECONDS
    clock.now += 1.0
    assert refusals.note() == 0.0


def test_number_of_delayed_responses_is_bounded() -> None:
    refusals = AuthFailureThrottle(Clock())
    for _ in range(FREE_PER_SECOND):
        refusals.note()
    contexts = [refusals.waiting() for _ in range(MAX_WAITING)]
    for context in contexts:
        context.__enter__()
    assert refusals.note() == 0.0
    contexts[0].__exit__(None, None, None)
    assert refusals.note() == WAIT_SECONDS
