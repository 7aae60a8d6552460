"""How plain processes of ranks are started."""

import tempfile

import pytest

from coordinator.ranks import local_fleet
from longleaf.config import DeviceName, EngineConfig


@pytest.mark.parametrize(
    ("device", "has_driver", "method"),
    [
        ("cpu", True, "forkserver"),
        ("auto", False, "forkserver"),
        ("auto", True, "spawn"),
        ("cuda", False, "spawn"),
    ],
)
def test_ranks_that_may_be_on_gpus_are_not_forked(
    monkeypatch: pytest.MonkeyPatch, device: DeviceName, has_driver: bool, method: str
) -> None:
    monkeypatch.setattr(local_fleet, "has_gpu_driver", lambda: has_driver)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert local_fleet._start_method(EngineConfig(model="none", device=device)) == method


def test_ranks_are_not_forked_where_names_of_sockets_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "n" * local_fleet.MAX_TEMP_PATH_BYTES)
    assert local_fleet._start_method(EngineConfig(model="none", device="cpu")) == "spawn"
