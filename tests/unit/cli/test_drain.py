"""The output of `longleaf drain`."""

import pytest

from longleaf.cli.drain import described
from longleaf.service_settings import UNLIMITED_DRAIN_SECONDS
from longleaf.types import Draining


@pytest.mark.parametrize(
    ("open_calls", "has_waited", "text"),
    [
        (2, False, "draining: 2 calls running, with 2 s to finish"),
        (0, True, "drained"),
        (1, True, "drained: 1 call was cut off after 2 s (serve --drain-seconds)"),
        (3, True, "drained: 3 calls were cut off after 2 s (serve --drain-seconds)"),
    ],
)
def test_cancelled_calls_are_reported(open_calls: int, has_waited: bool, text: str) -> None:
    assert described(Draining(open_calls=open_calls, limit=2.0), has_waited) == text


def test_drain_without_a_limit_names_none() -> None:
    found = Draining(open_calls=1, limit=UNLIMITED_DRAIN_SECONDS)
    assert described(found, has_waited=False) == "draining: 1 call running"
