"""Trouble with a storage is told once, and waited for ever longer."""

import asyncio
import logging

import pytest

from coordinator.persistence.snapshots.storage_health import MOST_SECONDS, StorageHealth


def test_only_changes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = list[str]()
    trouble = StorageHealth("writing")
    trouble.watch(lambda: told.append(trouble.reason))
    trouble.end()
    for reason in ("it is full", "it is full", "it is away"):
        trouble.begin(reason)
        assert trouble.reason == reason
    trouble.end()
    trouble.end()
    assert trouble.reason == ""
    trouble.begin("it is full")
    assert [record.message for record in caplog.records] == [
        "writing: not done for now, and the service goes on: it is full",
        "writing: done again",
        "writing: not done for now, and the service goes on: it is full",
    ]
    assert told == ["it is full", "it is away", "", "it is full"]


async def test_each_wait_is_longer_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    trouble = StorageHealth("writing")
    for _ in range(8):
        await trouble.wait()
    trouble.end()
    await trouble.wait()
    assert waits == [1, 2, 4, 8, 16, 32, MOST_SECONDS, MOST_SECONDS, 1]
