"""A service with the embedded model, and a gateway in front of it in a separate process, at an address that stays."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from longleaf.client import Client
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig
from longleaf.types import Cluster, Context
from tests.support.command_line import Served, end

PATIENCE_SECONDS = 60
ROOM = "1200000000"


class Behind:
    """Both processes as a context manager. `url` is that of the page, and the methods act as other clients. Options are
    those of the service; `credential` is used by those clients if the service requires one.
    """

    def __init__(self, *options: str, credential: str | None = None) -> None:
        self._options = ("--world-size", "2", "--launcher", "local", "--kv-bytes", ROOM, *options)
        self._credential = credential
        self._stack = ExitStack()
        self._server_port, self._gateway_port = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self._gateway_port}/"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            self.find_service()
            self.find_gateway()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def find_service(self) -> None:
        """Starts it, at the address that it always has."""
        served = Served(*self._options, "--port", str(self._server_port))
        self._served = self._stack.enter_context(served)
        self._client = self._stack.enter_context(Client(served.address, credential=self._credential))

    def lose_service(self) -> None:
        end(self._served.process)

    def find_gateway(self) -> None:
        config = GatewayConfig(server=self._served.address, port=self._gateway_port, as_json=True)
        gateway = subprocess.Popen(gateway_command(config), stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._stack.callback(end, gateway)
        self._gateway = gateway
        assert gateway.stdout is not None
        assert json.loads(gateway.stdout.readline())["http"].rstrip("/") == self.url.rstrip("/")

    def lose_gateway(self) -> None:
        end(self._gateway)

    def contexts(self) -> list[Context]:
        return sorted(self._client.list_contexts(), key=lambda context: context.id)

    def tokens(self) -> dict[str, int]:
        """How many each context has."""
        return {context.id: context.tokens for context in self.contexts()}

    def ingest(self, name: str, text: str) -> None:
        self._client.ingest(name, text)

    def delete(self, name: str) -> None:
        self._client.delete_context(name)

    def clear(self) -> None:
        """Nothing is left, and nothing is on its way."""
        self.wait_idle()
        for context in self.contexts():
            self.delete(context.id)

    def cluster(self) -> Cluster:
        return self._client.cluster()

    def wait_idle(self) -> None:
        self.wait(lambda: self.cluster().running == 0)

    def wait(self, holds: Callable[[], bool]) -> None:
        over = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < over
            time.sleep(0.05)

    @contextmanager
    def frozen_ranks(self) -> Iterator[None]:
        """Ranks compute nothing meanwhile."""
        pids = [worker.pid for worker in self.cluster().workers]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def kill_rank(self, rank: int) -> None:
        os.kill(self.cluster().workers[rank].pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
