"""No callback of the coordinator's event loop computes for long, for any client input."""

import pytest

from tests.integration.bench.test_runs import run_benchmark

ATTACKS = (
    "token_ids_4mib",
    "logit_bias_4mib",
    "many_sampling_settings",
    "calls_at_once",
    "held_stop_strings",
    "quotas_of_many",
    "conversation_shapes",
    "segment_records",
    "context_ends",
    "earlier_contexts",
)
"""Inputs of the largest accepted size; larger ones are refused after their beginning."""


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_at_most_one_callback_in_a_thousand_computes_for_five_milliseconds() -> None:
    """CPU time of the loop's thread; other processes and threads do not count."""
    arguments = ("--repeats", "1", "--seconds", "0.5", "--attacks", *ATTACKS)
    rows = run_benchmark("bench.hostile", *arguments, timeout_s=1100)  # two minutes on an idle machine
    assert [row["attack"] for row in rows] == list(ATTACKS)
    long = {row["attack"]: row["attacked"]["num_long_callbacks"] for row in rows}
    assert sum(long.values()) <= sum(row["attacked"]["num_callbacks"] for row in rows) / 1000, long
    assert not any(row["died"] or row["unanswered"] for row in rows)
