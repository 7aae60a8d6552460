"""Calls that the readiness gate admits before the model is loaded, while it is served, and after."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from coordinator.grpc_server.readiness_gate import ReadinessGate
from coordinator.handlers.application import Application
from longleaf.errors import Unavailable

GENERATE, WATCH, DRAIN, HEALTH = (
    "/longleaf.v1.GenerationService/Generate",
    "/longleaf.v1.ClusterService/WatchCluster",
    "/longleaf.v1.ClusterService/Drain",
    "/grpc.health.v1.Health/Check",
)
NOTHING = cast(Application, object())
STOPPING = Unavailable("stopping", 1.0)


def loading_gate() -> ReadinessGate:
    return ReadinessGate(lambda: Unavailable("loading", 2.0))


def refusal(readiness: ReadinessGate, method: str) -> str | None:
    try:
        with readiness.enter(method):
            return None
    except Unavailable as error:
        return str(error)


async def call(readiness: ReadinessGate, end: asyncio.Event) -> None:
    with readiness.enter(GENERATE):
        await end.wait()


async def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a task and runs it until it first waits."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("method", [GENERATE, WATCH])
async def test_model_calls_are_admitted_between_open_and_close(method: str) -> None:
    readiness = loading_gate()
    assert (refusal(readiness, method), readiness.is_open) == ("loading", False)
    readiness.open(NOTHING)
    assert (refusal(readiness, method), readiness.is_open) == (None, True)
    readiness.close(STOPPING)
    assert (refusal(readiness, method), readiness.is_open) == ("stopping", False)


@pytest.mark.parametrize("method", [DRAIN, HEALTH])
def test_other_calls_are_always_admitted(method: str) -> None:
    readiness = loading_gate()
    assert refusal(readiness, method) is None
    readiness.close(STOPPING)
    assert refusal(readiness, method) is None


def test_closed_gate_stays_closed() -> None:
    readiness = loading_gate()
    readiness.close(STOPPING)
    readiness.open(NOTHING)
    assert refusal(readiness, GENERATE) == "stopping"


async def test_running_calls_are_waited_for() -> None:
    readiness = loading_gate()
    readiness.open(NOTHING)
    ends = [asyncio.Event(), asyncio.Event()]
    calls = [await start(call(readiness, end)) for end in ends]
    waiting = await start(readiness.wait_empty(60))
    readiness.close(STOPPING)
    for end, one in zip(ends, calls, strict=True):
        assert (readiness.num_open > 0, waiting.done()) == (True, False)
        await readiness.wait_empty(0)  # no longer than that
        end.set()
        await one
    await waiting
    assert readiness.num_open == 0


async def test_waiting_calls_are_ended_with_the_reason() -> None:
    readiness = loading_gate()
    readiness.open(NOTHING)
    one = await start(call(readiness, asyncio.Event()))
    readiness.end(STOPPING)
    with pytest.raises(Unavailable, match="^stopping$"):
        await one
    assert (one.cancelled(), readiness.num_open) == (False, 0)


async def test_calls_of_disconnected_clients_are_only_cancelled() -> None:
    readiness = loading_gate()
    readiness.open(NOTHING)
    one = await start(call(readiness, asyncio.Event()))
    one.cancel()
    await asyncio.wait([one])
    assert (one.cancelled(), readiness.num_open) == (True, 0)


async def test_calls_that_never_end_are_not_waited_for() -> None:
    readiness = loading_gate()
    readiness.open(NOTHING)
    with readiness.enter(WATCH), readiness.enter(HEALTH), readiness.enter(DRAIN):
        assert readiness.num_open == 0
        await readiness.wait_empty(60)
