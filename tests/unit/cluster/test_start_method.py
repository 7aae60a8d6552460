"""The start method of local rank processes."""

import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

from coordinator.cluster import fork_server
from longleaf.config import DeviceName, EngineConfig


@pytest.mark.parametrize(
    ("device", "has_driver", "method"),
    [("cpu", True, "forkserver"), ("auto", False, "forkserver"), ("auto", True, "spawn"), ("cuda", False, "spawn")],
)
def test_gpu_ranks_are_not_forked(
    monkeypatch: pytest.MonkeyPatch, device: DeviceName, has_driver: bool, method: str
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(fork_server, "has_gpu_driver", lambda: has_driver)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", lambda names: None)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: seen.append(dict(os.environ)))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = dict(os.environ)
    assert fork_server.start(EngineConfig(model="none", device=device), ["a.module"]) == method
    assert [each["HF_HUB_OFFLINE"] for each in seen] == (["1"] if method == "forkserver" else [])
    assert dict(os.environ) == before


def test_ranks_are_spawned_if_no_fork_server_can_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "ensure_running", server.ensure_running)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: str(tmp_path / ("n" * 100)))
    assert fork_server.start(EngineConfig(model="none", device="cpu"), ["a.module"]) == "spawn"
    assert "ranks will start more slowly" in caplog.text
