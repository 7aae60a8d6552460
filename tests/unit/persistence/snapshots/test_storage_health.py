"""Trouble with a storage is told once, and waited for ever longer."""

import asyncio
import logging

import pytest

from coordinator.persistence.snapshots.storage_health import MOST_SECONDS, StorageHealth


def test_only_changes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reported = list[str]()
    outage = StorageHealth("writing")
    outage.watch(lambda: reported.append(outage.reason))
    outage.end()
    for reason in ("it is full", "it is full", "it is away"):
        outage.begin(reason)
        assert outage.reason == reason
    outage.end()
    outage.end()
    assert outage.reason == ""
    outage.begin("it is full")
    assert [record.message for record in caplog.records] == [
        "writing: failed, will retry: it is full",
        "writing: succeeded again",
        "writing: failed, will retry: it is full",
    ]
    assert reported == ["it is full", "it is away", "", "it is full"]


async def test_each_wait_is_longer_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    outage = StorageHealth("writing")
    for _ in range(8):
        await outage.wait()
    outage.end()
    await outage.wait()
    assert waits == [1, 2, 4, 8, 16, 32, MOST_SECONDS, MOST_SECONDS, 1]
