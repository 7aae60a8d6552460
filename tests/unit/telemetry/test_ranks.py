"""The log of a rank process."""

import json
import logging

import pytest

from longleaf.logs import Logs
from longleaf.rank_protocol.group_messages import Join
from longleaf.service_settings import TelemetryConfig
from workers.__main__ import LOGGERS, ProcessContext
from workers.logs import capturing_logs


def test_lines_have_rank_and_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    place = ProcessContext("n1")
    logs = Logs(TelemetryConfig(log_format="json"), LOGGERS, place.facts)
    try:
        logging.getLogger("workers.member_process").warning("one")
        place.join(Join(epoch=3, rank=2, host="h", port=1, nodes=("n1",)))
        logging.getLogger("longleaf.comm").warning("two")
    finally:
        logs.take_down()
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert {"rank", "epoch"}.isdisjoint(first) and first["node"] == "n1"
    assert (second["message"], second["rank"], second["epoch"], second["node"]) == ("two", 2, 3, "n1")


def test_startup_notes_are_logged_only_by_the_coordinator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs = Logs(TelemetryConfig(log_level="debug"), LOGGERS)
    try:
        with capturing_logs() as notes:
            logging.getLogger("longleaf.kernels").warning("slower")
        logging.getLogger("longleaf.kernels").warning("later")
    finally:
        logs.take_down()
    assert (notes.warnings, capsys.readouterr().err) == (["slower"], "later\n")
