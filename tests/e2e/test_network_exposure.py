"""The attack surface of a service: no open socket on the network, and only token-protected Ray sockets on its
machine."""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.command_line import Served
from tests.support.network import stranger
from tests.support.tools import lacks

pytestmark = pytest.mark.timeout(240)

NETWORK = """
ip link set lo up
ip link add outer type veth peer name other
ip address add 198.51.100.7/24 dev outer
ip link set outer up
ip link set other up
ip route add default dev outer
export RES_OPTIONS="timeout:1 attempts:1"
exec "$@"
"""
"""A machine whose address is not the loopback's. No name server answers there, and torch resolves names."""
INSIDE = ("unshare", "--net", "--map-root-user", "sh", "-ec", NETWORK, "sh")
WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""State of a listening socket, as the kernel prints it."""
KNOWN = "a publicly known token"
FIGURES = {"monitor.py", "dashboard.py", "ray::DashboardAgent"}
"""Ray processes that serve metrics on this machine without a token, and nothing else."""

OWN = ("gcs_server", "raylet", "ray::CoordinatorActor", "ray::WorkerActor")
"""Ray processes whose environment is readable for others."""


@pytest.fixture(scope="module")
def inside() -> tuple[str, ...]:
    """Command prefix for a separate network namespace."""
    try:
        tried = subprocess.run([*INSIDE, "true"], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError as error:
        lacks(f"no network namespaces: {error}")
    if tried.returncode:
        lacks(f"no network namespaces: {tried.stderr.strip()}")
    return INSIDE


class ListeningSocket(NamedTuple):
    """A listening socket and the process that opened it."""

    owner: str
    host: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        return ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def listening_sockets(pid: int) -> set[ListeningSocket]:
    """All listening sockets of a process's network namespace."""
    owners = dict(_owners())
    found = set()
    for family, state in WAITING.items():
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                host, port = fields[1].split(":")
                found.add(ListeningSocket(owners.get(fields[9], "?"), _host(host), int(port, 16)))
    return found


def _host(digits: str) -> str:
    """An address as the kernel prints it, in words of four bytes."""
    words = b"".join(struct.pack("=I", int(digits[start : start + 8], 16)) for start in range(0, len(digits), 8))
    address = ip_address(words)
    return str((address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address)


def _owners() -> Iterator[tuple[str, str]]:
    """Socket inodes and their owner: the name of a script, of an actor or of the process."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            scripts = [Path(word).name for word in process.cmdline() if word.endswith(".py")]
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                if match := re.match(r"socket:\[(\d+)\]", os.readlink(link)):
                    # Ray appends the method that an actor runs at this moment
                    yield match[1], (scripts or [process.name().partition(".")[0]])[0]


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])])
def test_unauthenticated_peer_finds_no_open_socket(
    started: ExitStack, inside: tuple[str, ...], launcher: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", KNOWN)
    options = ("--world-size", "2", "--launcher", launcher, "--kv-bytes", "8000000")
    service = started.enter_context(Served(*options, before=inside))
    found = listening_sockets(service.process.pid)
    assert len(found) >= 3, "gRPC, the control channel and the ranks' store at least"
    assert {listener for listener in found if not listener.is_on_loopback} == set()
    if launcher == "ray":
        ours = int(service.address.rpartition(":")[2])
        check_ray(service, {listener for listener in found if listener.port != ours})
    assert service.stop() == 0


def check_ray(service: Served, found: set[ListeningSocket]) -> None:
    """Ray answers only callers with its token, and does not expose the token."""
    (raylet,) = (process for process in service.processes() if process.name() == "raylet")
    token_file = Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"])
    token = token_file.read_text()
    assert [path.stat().st_mode & 0o777 for path in (token_file.parent, token_file)] == [0o700, 0o600]
    assert not any(token in word for process in service.processes() for word in process.cmdline())
    own = [one.environ() for one in service.processes() if one.name().startswith(OWN)]
    assert len(own) == 5, "two ranks"
    assert {(each["RAY_AUTH_MODE"], each["RAY_AUTH_TOKEN_PATH"]) for each in own} == {("token", str(token_file))}
    # not the ranks: the coordinator's Ray sockets are checked above, and gloo's never answer
    answers = connect_to(service, "", {listener for listener in found if listener.owner != "ray::WorkerActor"})
    refused = {
        listener for listener, answer in answers.items() if answer in (["401"], ["UNAUTHENTICATED", "UNIMPLEMENTED"])
    }
    reported = {(listener.owner, answer[0][:6]) for listener, answer in answers.items() if listener not in refused}
    assert reported == {(owner, "# HELP") for owner in FIGURES} | {("ray::CoordinatorActor", "")}, "ZMQ sends nothing"
    assert {"gcs_server", "raylet", "ray::CoordinatorActor"} <= {listener.owner for listener in refused}
    gcs = {listener for listener in found if listener.owner == "gcs_server"}
    assert [answer[:1] for answer in connect_to(service, KNOWN, gcs).values()] == [["UNAUTHENTICATED"]]
    assert [answer[:1] for answer in connect_to(service, token, gcs).values()] == [["OK"]]


def connect_to(service: Served, token: str, found: set[ListeningSocket]) -> dict[ListeningSocket, list[str]]:
    """The response to a process in the service's network (stranger.py), with this token or without one."""
    enter = ["nsenter", "--target", str(service.process.pid), "--user", "--net", "--preserve-credentials"]
    command = [*enter, sys.executable, stranger.__file__, token, *map(str, found)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    answers = json.loads(output)
    return {listener: answers[str(listener)] for listener in found}


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_files_in_the_start_directory_are_not_executed(
    checkpoint: Path, started: ExitStack, tmp_path: Path, launcher: str
):
    for name in ("coordinator", "workers", "msgspec", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the start directory was executed')")
    (tmp_path / "model").symlink_to(checkpoint)
    options = ("--model", "model", "--launcher", launcher, "--kv-bytes", "8000000")
    service = started.enter_context(Served(*options, before=("env", "-C", str(tmp_path))))
    assert service.stop() == 0
