"""The next deadline, and the expired ones, compared with a scan of all deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.expiry_heap import ExpiryHeap

KEYS = st.integers(0, 9)
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0])
OPERATIONS = st.lists(st.tuples(KEYS, st.none() | TIMES, st.booleans()), max_size=60)


@given(OPERATIONS, TIMES)
def test_deadlines_are_those_that_were_set_last(operations: list[tuple[int, float | None, bool]], now: float) -> None:
    deadlines, expected = ExpiryHeap[int](), dict[int, float]()
    for key, deadline, is_discarded in operations:
        expected.pop(key, None)
        if is_discarded:
            deadlines.discard(key)
        else:
            deadlines.add(key, deadline)
            expected |= {} if deadline is None else {key: deadline}
        deadlines.audit()
        assert set(deadlines) == expected.keys()
        passed = deadlines.passed(now)
        assert sorted(passed) == sorted(key for key, deadline in expected.items() if deadline <= now)
        assert [expected[key] for key in passed] == sorted(expected[key] for key in passed)
        assert deadlines.next == min(expected.values(), default=None)


def test_what_is_set_again_and_again_takes_no_room() -> None:
    deadlines = ExpiryHeap[str]()
    for number in range(1000):
        deadlines.add("a", 1000.0 - number)
        deadlines.add("b", 1000.0 + number)
    deadlines.audit()
    assert len(deadlines._heap) <= 5
