"""Storage errors are logged once, with growing delays between attempts."""

import asyncio
import logging

import pytest

from coordinator.persistence.snapshots.storage_health import MOST_SECONDS, StorageHealth


def test_only_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reported = list[str]()
    health = StorageHealth("writing", lambda: reported.append(health.reason))
    health.set_healthy()
    for reason in ("it is full", "it is full", "it is away"):
        health.set_failed(reason)
        assert health.reason == reason
    health.set_healthy()
    health.set_healthy()
    assert health.reason == ""
    health.set_failed("it is full")
    assert [record.message for record in caplog.records] == [
        "writing: failed, will retry: it is full",
        "writing: succeeded again",
        "writing: failed, will retry: it is full",
    ]
    assert reported == ["it is full", "it is away", "", "it is full"]


async def test_delay_grows_until_the_error_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    health = StorageHealth("writing", lambda: None)
    for _ in range(8):
        await health.wait()
    health.set_healthy()
    await health.wait()
    assert waits == [1, 2, 4, 8, 16, 32, MOST_SECONDS, MOST_SECONDS, 1]
