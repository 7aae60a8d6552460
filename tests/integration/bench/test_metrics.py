"""The measurement of metrics, with few of everything."""

from bench.metrics import per_event, scraped, table


async def test_an_answer_is_timed_and_grows_with_what_there_is() -> None:
    few, more_ranks, more_tenants = [await scraped(*size, 4, repeats=2) for size in ((2, 1), (8, 1), (2, 3))]
    assert (few["ranks"], few["tenants"], few["contexts"]) == (2, 1, 4)
    assert more_ranks["series"] - few["series"] == 6 * 3, "three gauges of each rank"
    assert more_tenants["series"] - few["series"] > 2 * 100, "histograms of each tenant"
    assert few["event_loop_ms"] > 0
    assert 0 < few["ms_p50"] <= few["ms_p99"]


def test_events_are_timed() -> None:
    found = per_event(100)
    assert set(found) == {"token", "token_without_metrics", "call", "generation", "step"}
    assert all(microseconds > 0 for microseconds in found.values())
    assert "token" in table({"scrape": {}, "event_us": found})
