"""The measured services: a gateway in front of a service, each in a separate process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from bench.gateway.reading import Prompt
from bench.harness.service import hosted
from coordinator.text.checkpoint import Checkpoint
from longleaf.config import EngineConfig, embedded_model
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig

KV_BYTES = 1 << 30
END_SECONDS = 30.0
STREAMS = 64


@dataclass(frozen=True, slots=True)
class GatewayFixture:
    """A service, and the gateway in front of it."""

    address: str
    url: str
    gateway: psutil.Process
    prompt: Prompt


@contextmanager
def real(world_size: int) -> Iterator[GatewayFixture]:
    """The embedded model on ranks of this machine."""
    model = embedded_model()
    config = EngineConfig(model=str(model), world_size=world_size, kv_bytes=KV_BYTES // world_size)
    end = min(Checkpoint.read(model).end_tokens)
    with hosted(None, config, "local") as address, _gateway(address, Prompt(model.name, 65, end)) as found:
        yield found


@contextmanager
def paced() -> Iterator[GatewayFixture]:
    """Answers that cost nothing, and come in time."""
    command = [sys.executable, "-m", "bench.gateway.paced"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            address = service.stdout.readline().strip()
            with _gateway(address, Prompt("fake", 65, 0)) as found:
                yield found
        finally:
            service.terminate()
            service.wait(END_SECONDS)


@contextmanager
def _gateway(address: str, prompt: Prompt) -> Iterator[GatewayFixture]:
    command = gateway_command(GatewayConfig(server=address, port=0, as_json=True))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["http"].rstrip("/")
            yield GatewayFixture(address, url, psutil.Process(process.pid), prompt)
        finally:
            process.terminate()
            process.wait(END_SECONDS)
