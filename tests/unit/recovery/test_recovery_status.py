"""The recovery status for clients and in the log."""

import pytest

from coordinator.engine_messages import ContextDropped
from coordinator.recovery.recovery_status import RecoveryStatus
from longleaf.types import Recovering


def test_lost_and_recovered_tokens_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 10.0
    recoveries = RecoveryStatus(lambda: now)
    recoveries.begin(2, 10.0)
    for done in (0, 1000, 2000):
        recoveries.update(Recovering(0, done, 3000), [])
    now = 14.0
    recoveries.update(Recovering(0, 2000, 5000), [ContextDropped("book", 1234, "no room")])
    recoveries.update(None, [])
    recoveries.update(None, [])
    assert [record.message for record in caplog.records] == [
        "recovering 3,000 lost tokens",
        "dropped context book with 1,234 tokens: no room",
        "recovering 5,000 lost tokens",
        "recovered 5,000 lost tokens in 4 s; dropped contexts: 1",
    ]


def test_recovery_without_lost_tokens_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    recoveries = RecoveryStatus(lambda: 1.0)
    recoveries.begin(2, 0.0)
    recoveries.update(None, [])
    assert recoveries.latest is not None
    assert recoveries.latest.is_done
    assert not caplog.records
