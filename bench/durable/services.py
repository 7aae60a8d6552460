"""Services over a data folder: started as a user would, killed as nobody should, and asked what they read."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.harness.service import START_SECONDS
from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig, SnapshotsChoice, embedded_model
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.messages import Delta, Recovering

WORLD_SIZE = 2
BYTES_PER_TOKEN = 4096
"""Of keys and values of the embedded model."""
CONTEXT = "book"
ANSWERED = 8
"""Tokens of an answer."""
LOOK_SECONDS = 0.01


@dataclass
class Service:
    """One that runs, and when its start began."""

    process: ServiceProcess
    client: Client
    began: float
    ready_s: float
    """From there until it listened."""

    def ingest(self, ids: list[int], name: str = CONTEXT) -> float:
        """Seconds to the acknowledgement."""
        began = time.perf_counter()
        self.client.ingest(name, tuple(ids), capacity=max(131_072, len(ids) + 4096))
        return time.perf_counter() - began

    def ask(self, question: list[int], name: str | None = CONTEXT) -> dict[str, float]:
        """Seconds until the context is held, until the first token, and until the last one."""
        began, found = time.perf_counter(), {"restore_s": 0.0, "first_token_s": 0.0}
        for event in self.client.generate(question, context=name, max_tokens=ANSWERED, ignore_end_token=True):
            if isinstance(event, Recovering):
                found["restore_s"] = time.perf_counter() - began
            if isinstance(event, Delta) and not found["first_token_s"]:
                found["first_token_s"] = time.perf_counter() - began
        return found | {"answer_s": time.perf_counter() - began}

    def kill(self) -> None:
        """All of its processes, by SIGKILL."""
        pid: Any = self.process._process.pid  # pyright: ignore[reportPrivateUsage]
        main = psutil.Process(pid)
        everybody = [main, *main.children(recursive=True)]
        for process in everybody:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(everybody, timeout=60)


@contextmanager
def serving(
    data_dir: Path, num_tokens: int, *, world_size: int = WORLD_SIZE, snapshots: SnapshotsChoice = "seal"
) -> Iterator[Service]:
    """With room for so many tokens, and some more."""
    kv_bytes = (num_tokens // world_size + 16_384) * BYTES_PER_TOKEN
    config = EngineConfig(model=str(embedded_model()), world_size=world_size, kv_bytes=kv_bytes, allow_long=True)
    data = DataConfig(data_dir=str(data_dir), snapshots=snapshots)
    command = coordinator_command(config, host="127.0.0.1", port=0, launcher="local", data=data)
    began = time.perf_counter()
    with ServiceProcess(command) as process:
        address = process.wait_ready(START_SECONDS)
        ready_s = time.perf_counter() - began
        with Client(address) as client:
            yield Service(process, client, began, ready_s)


def wait_saved(data_dir: Path, num_before: int = 0) -> float:
    """Waits until one more manifest is on storage than there were; seconds."""
    began = time.perf_counter()
    while len(manifests(data_dir)) <= num_before:
        time.sleep(LOOK_SECONDS)
        if time.perf_counter() - began > START_SECONDS:
            raise RuntimeError("nothing is saved")
    return time.perf_counter() - began


def manifests(data_dir: Path) -> list[Path]:
    return list(data_dir.glob("*/snapshots/services/*/segments/*/*/manifest"))


def pieces(data_dir: Path) -> list[Path]:
    return list(data_dir.glob("*/snapshots/services/*/segments/*/*/*.safetensors"))


def copy_s(paths: list[Path], target: Path) -> float:
    """Seconds that a plain copy of these files takes, one after the other, each with fsync."""
    target.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for number, path in enumerate(paths):
        with path.open("rb") as source, (target / str(number)).open("wb") as copy:
            while block := source.read(1 << 20):
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
    seconds = time.perf_counter() - began
    for path in target.iterdir():
        path.unlink()
    return seconds
