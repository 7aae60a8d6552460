"""A real API server, from binaries in the layout of controller-runtime's tests: KUBEBUILDER_ASSETS names their folder.

No other part of a cluster runs. Applied objects are checked, admitted and stored, without further effect: there is no
controller that makes pods, and no kubelet that starts them.
"""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.tools import lacks

Document = dict[str, Any]
VARIABLE = "KUBEBUILDER_ASSETS"
HERE = "127.0.0.1"
TOKEN = "a-token-of-this-test"
START_SECONDS = 120.0


def assets() -> Path:
    """The folder of the binaries. A test that lacks it is skipped, or fails where REQUIRE_TOOLS is set."""
    folder = Path(os.environ.get(VARIABLE) or lacks(f"{VARIABLE} names no folder with an API server"))
    missing = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (folder / name).exists()]
    return lacks(f"{folder} has no {', '.join(missing)}") if missing else folder


class ApiServer:
    """Runs with a separate etcd in `folder`, on this machine's loopback; nothing of it outlives the block."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
        self._stack = ExitStack()
        self._port = 0

    def __enter__(self) -> Self:
        with self._stack:
            etcd, self._port = _free_ports(2)
            self._start("etcd", *_etcd_options(self._folder, etcd))
            self._start("kube-apiserver", *_server_options(self._folder, etcd, self._port))
            self._wait_ready()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self, name: str, *options: str) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        process = subprocess.Popen([str(self._binaries / name), *options], stdout=log, stderr=log, cwd=self._folder)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _wait_ready(self) -> None:
        deadline = monotonic() + START_SECONDS
        while (answer := self.kubectl("get", "--raw=/readyz")).returncode != 0:
            assert monotonic() < deadline, f"{answer.stderr}; logs are in {self._folder}"
            sleep(0.2)

    def kubectl(self, *arguments: str, documents: Sequence[Document] = ()) -> subprocess.CompletedProcess[str]:
        """Runs a kubectl command, which reads `documents` where its argument is `-`."""
        access = (f"--server=https://{HERE}:{self._port}", "--insecure-skip-tls-verify", f"--token={TOKEN}")
        own = {"HOME": str(self._folder), "KUBECONFIG": os.devnull, "PATH": os.defpath}
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
        command = [str(self._binaries / "kubectl"), *access, *arguments]
        return subprocess.run(command, input=text, env=own, capture_output=True, text=True, check=False, timeout=120)


def _etcd_options(folder: Path, port: int) -> tuple[str, ...]:
    clients = f"http://{HERE}:{port}"
    listens = (f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}")
    return (f"--data-dir={folder / 'etcd'}", f"--listen-peer-urls=http://{HERE}:0", *listens, "--unsafe-no-fsync")


def _server_options(folder: Path, etcd: int, port: int) -> tuple[str, ...]:
    (folder / "tokens.csv").write_text(f"{TOKEN},tester,tester,system:masters\n")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    kinds = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (folder / "accounts.key").write_bytes(key.private_bytes(*kinds))
    return (
        f"--etcd-servers=http://{HERE}:{etcd}",
        f"--bind-address={HERE}",
        f"--advertise-address={HERE}",
        "--endpoint-reconciler-type=none",  # an address of the loopback may be no endpoint
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",  # it makes its own
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'accounts.key'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
    )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HERE, 0))).getsockname()[1] for _ in range(count)]
