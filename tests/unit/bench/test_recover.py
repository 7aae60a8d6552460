"""What is told of losses: medians, percentiles, gaps, and the page."""

import json

import pytest

from bench import recover, report
from bench.recover import Kill, Measured


def kill(seconds: float, *, is_equal: bool = True) -> Kill:
    return Kill(seconds, seconds, 10 * seconds, 5 * seconds, 20 * seconds, 100, 100, is_equal)


@pytest.mark.parametrize(
    ("times", "expected"),
    [([1.0, 2.1, 2.3, 5.0, 5.5], 2.7), ([1.0, 9.0], 7.0), ([1.0, 1.5], 0.0), ([], 0.0)],
)
def test_a_token_on_its_way_does_not_end_a_stall(times: list[float], expected: float) -> None:
    """The stream is broken off at 2.0; a token that the service had sent by then comes later."""
    assert recover.longest_gap(times, 2.0) == pytest.approx(expected)


def test_losses_are_told_by_medians() -> None:
    row = recover.summary(Measured(40.0, 2, [kill(0.1), kill(0.2), kill(0.9, is_equal=False)]))
    assert (row["noticed_s"], row["recovery_s"], row["ratio"]) == (0.2, 2.0, 0.05)
    assert row["noticed_s_p95"] == 0.83
    assert (row["kills"], row["equal_streams"], row["near_ties"]) == (3, 2, 2)


def test_a_row_is_shown_to_people_and_on_the_page() -> None:
    row = {"model": "embedded", "context_tokens": 64, "world_size": 4, **recover.summary(Measured(2.0, 1, [kill(0.1)]))}
    way = {"launcher": "ray", "how": "killed", "kills": 1, "noticed_s": 0.3, "noticed_s_p95": 0.4}
    way |= {"formed_s": 0.5, "formed_s_p95": 0.6}
    text = recover.table([row], [way])
    assert "recovered 1.0 s of 2.0 s: ratio 0.5" in text
    assert text.endswith("1 ranks killed, launcher ray: noticed 0.3 s (95 %: 0.4), formed 0.5 s (95 %: 0.6)")
    machine = json.loads((report.file("overhead")).read_text())["machine"]
    page = report.page({"recover": {"target": 0.45, "rows": [row], "noticed": [way], "machine": machine}})
    assert "| embedded | 64 | 1 | 0.1 | 0.1 | 100 | 1.0 | 2.0 | 0.5 | 0.5 | 2.0 | 1 | 1 |" in page
    assert "| killed | ray | 1 | 0.3 | 0.4 | 0.5 | 0.6 |" in page
