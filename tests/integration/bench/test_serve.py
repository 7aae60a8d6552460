"""The load generator: its arrivals, its statistics, and a run against a service."""

import argparse
import random
from statistics import mean

import pytest

from bench.harness.timing import percentiles
from bench.serve.__main__ import lines, measure, parse, summary
from bench.serve.load import Answer, Documents, poisson
from coordinator.events import Prompt
from longleaf.errors import ResourceExhausted, Unavailable
from tests.support.service import FakeStream, Served, ids


def options(*arguments: str) -> argparse.Namespace:
    return parse([*"--rate 40 --duration 0.5 --lengths 20 --question 3 --outputs 4".split(), *arguments])


def test_arrivals_are_random_at_the_rate_and_the_seeds():
    times = poisson(random.Random(1), 50.0, 100.0)
    assert times == poisson(random.Random(1), 50.0, 100.0) != poisson(random.Random(2), 50.0, 100.0)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert all(0 <= time < 100 for time in times) and times == sorted(times)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert mean(gap * gap for gap in gaps) == pytest.approx(2 * mean(gaps) ** 2, rel=0.1), "exponential gaps"


def test_documents_are_the_seeds():
    assert Documents("a", 100).make(50) == Documents("a", 100).make(50) != Documents("b", 100).make(50)
    assert set(Documents("a", 7).make(500)) == set(range(7))


def test_percentiles_lie_between_the_nearest_values():
    assert percentiles("x", [i / 1e3 for i in range(101)]) == {"x_p50": 50.0, "x_p95": 95.0, "x_p99": 99.0}
    assert percentiles("x", [0.002]) == {"x_p50": 2.0, "x_p95": 2.0, "x_p99": 2.0}
    assert percentiles("x", []) == {"x_p50": None, "x_p95": None, "x_p99": None}


def test_goodput_counts_refusals_and_both_limits():
    fast = Answer(10.0, 10.1, [11.0, 11.1, 11.2], 3, 11.2)
    late = Answer(10.0, 10.0, [15.0, 15.1, 15.2], 3, 15.2)
    slow = Answer(10.0, 10.0, [11.0, 12.0, 13.0], 3, 13.0)
    refused = Answer(12.0, 12.0, [], 0, 12.1, "refused")
    broken = Answer(12.0, 12.0, [12.5], 1, 20.0, "WorkerLost")
    row = summary([fast, late, slow, refused, broken], max_ttft_ms=2000, max_itl_ms=200)
    assert (row["requests"], row["completed"], row["refused"], row["failed"]) == (5, 3, 1, {"WorkerLost": 1})
    assert row["goodput"] == 0.2
    assert (row["ttft_ms_p50"], row["itl_ms_p50"]) == (1000.0, 100.0)
    assert (row["requests_per_s"], row["output_tokens_per_s"]) == (0.3, 0.9)
    assert row["late_ms_p99"] == pytest.approx(96.0)


def test_a_load_of_nothing_is_no_error():
    row = summary([], 1.0, 1.0)
    assert (row["requests"], row["goodput"], row["requests_per_s"]) == (0, None, None)
    assert lines([{"rate": 0.1, **row}])[1].split()[:3] == ["0.1", "0", "0"]


@pytest.mark.parametrize(
    ("documents", "contexts"), [("shared", {"bench-serve-20-0"}), ("distinct", {f"bench-serve-20-{i}" for i in (0, 1)})]
)
async def test_contexts_are_asked_and_deleted(service: Served, documents: str, contexts: set[str]) -> None:
    service.engine.answer = tuple((token_id,) for token_id in ids("abcd"))
    [row] = await measure(service.address, options("--documents", documents, "--count", "2"))
    warm_up, *asked = service.engine.prompts
    assert warm_up.context is None
    assert {prompt.context for prompt in asked} == contexts
    assert {len(prompt.token_ids) for prompt in asked} == {3}
    assert row["requests"] == row["completed"] == len(asked) > 5
    assert row["ttft_ms_p50"] and row["itl_ms_p99"] is not None
    assert not service.engine.contexts


async def test_documents_may_come_with_the_request(service: Served) -> None:
    service.engine.answer = (ids("abcd"),)
    [row] = await measure(service.address, options("--documents", "prompt"))
    assert {(prompt.context, len(prompt.token_ids)) for prompt in service.engine.prompts[1:]} == {(None, 20)}
    assert row["completed"] == row["requests"]
    assert row["itl_ms_p50"] is None, "one delta has no gap"


@pytest.mark.parametrize(
    ("error", "name"), [(ResourceExhausted("queue", "is full", 9.0), "refused"), (Unavailable("gone"), "Unavailable")]
)
async def test_errors_are_counted_and_not_tried_again(
    service: Served, error: Exception, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.engine.answer = (ids("abcd"),)
    submit = service.engine.submit

    def fail_once(prompt: Prompt) -> FakeStream:
        stream = submit(prompt)
        if len(service.engine.prompts) == 2:
            raise error
        return stream

    monkeypatch.setattr(service.engine, "submit", fail_once)
    [row] = await measure(service.address, options("--documents", "prompt"))
    assert {"refused": row["refused"], **row["failed"]}[name] == 1
    assert row["completed"] == row["requests"] - 1 == len(service.engine.prompts) - 2


async def test_an_answer_that_is_too_short_is_an_error(service: Served) -> None:
    service.engine.answer = (ids("abc"),)
    [row] = await measure(service.address, options("--documents", "prompt"))
    assert (row["completed"], row["failed"]) == (0, {"LongleafError": row["requests"]})


@pytest.mark.parametrize("arguments", [["--rate", "0"], ["--outputs", "-1"], ["--documents", "none"]])
def test_what_cannot_be_measured_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error" in capsys.readouterr().err
