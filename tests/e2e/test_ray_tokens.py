"""An existing Ray cluster with or without a token, and the errors of a service with a different setting."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.e2e.test_growing_cluster import free_ports
from tests.support.command_line import CLI, Served, end
from tests.support.network.ray_nodes import RAY

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.timeout(240)]
TOKEN = "a token of the cluster that is long enough"
PLACES = "RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH"


class Head(NamedTuple):
    """A cluster of one node on the loopback."""

    process: subprocess.Popen[str]
    address: str
    home: Path
    """Home folder of services that join: it contains no token."""

    def environment(self, **variables: str) -> dict[str, str]:
        """An environment with only these variables of Ray."""
        return environment(self.home) | variables


def environment(home: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {"HOME": str(home)}


@contextmanager
def head(home: Path, **variables: str) -> Iterator[Head]:
    [port] = free_ports(1)
    options = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2", "--include-dashboard=false"]
    options += ["--object-store-memory", "80000000", "--block", f"--temp-dir={home}"]
    process = subprocess.Popen(
        [RAY, "start", *options],
        env=environment(home) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise AssertionError("".join(lines))
        yield Head(process, f"127.0.0.1:{port}", home)
    finally:
        end(process)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A short path: Ray's sockets are in it, and their names are limited."""
    folder = Path(tempfile.mkdtemp(prefix="ll-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refused(cluster: Head, checkpoint: Path, **variables: str) -> str:
    """The error of a service with these variables."""
    options = ["--model", str(checkpoint), "--port", "0", "--kv-bytes", "8000000", "--ray-address", cluster.address]
    found = subprocess.run(
        [*CLI, "serve", *options],
        env=cluster.environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout) == (2, "")
    *others, output = found.stderr.splitlines()
    assert others == ["starting 1 rank (ray) …"], "neither a traceback nor output of Ray"
    prefix = f"error: --ray-address: the Ray cluster at {cluster.address} cannot be joined: "
    assert output.startswith(prefix)
    return output.removeprefix(prefix)


def check_serves(cluster: Head, checkpoint: Path, started: ExitStack, **variables: str) -> list[dict[str, str]]:
    """Starts a service with these variables and one rank; returns the environments of its processes in Ray."""
    before = ("env", "-i", *(f"{name}={value}" for name, value in cluster.environment(**variables).items()))
    options = ("--model", str(checkpoint), "--kv-bytes", "8000000", "--ray-address", cluster.address)
    service = started.enter_context(Served(*options, before=before))
    [rank] = service.rank_pids()
    environments = []
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.pid == rank or process.name().startswith("ray::Coord"):
                environments.append(process.environ())
    assert service.stop() == 0
    assert len(environments) == 2
    return environments


@pytest.fixture(scope="module")
def with_a_token() -> Iterator[Head]:
    with short_folder() as home, head(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as cluster:
        yield cluster


ASKS = f"it requires a token: set RAY_AUTH_MODE=token, and put the cluster's token in {PLACES}"
MISSING = f"RAY_AUTH_MODE=token is set, but no token was found: put the cluster's token in {PLACES}"
WRONG = f"it rejects the token: put the cluster's token in {PLACES}"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, ASKS),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN}, ASKS),
        ({"RAY_AUTH_MODE": "token"}, MISSING),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nothing/is/here"}, MISSING),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}, WRONG),
    ],
    ids=["none", "disabled", "missing", "no file", "another"],
)
def test_cluster_with_a_token_refuses_a_service_without_it(
    with_a_token: Head, checkpoint: Path, variables: dict[str, str], why: str
) -> None:
    assert refused(with_a_token, checkpoint, **variables) == why


def test_token_from_a_file_reaches_all_processes_of_the_service(
    with_a_token: Head, checkpoint: Path, started: ExitStack
) -> None:
    (token_file := with_a_token.home / "token").write_text(TOKEN)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    for found in check_serves(with_a_token, checkpoint, started, **variables):
        assert found["RAY_AUTH_MODE"] == "token"


@pytest.mark.slow
def test_cluster_without_a_token_is_joined_without_one(checkpoint: Path, started: ExitStack) -> None:
    """With a token, Ray accepts this process, but the processes that it starts there die."""
    with short_folder() as home, head(home, RAY_AUTH_MODE="disabled") as cluster:
        unasked = "the cluster requires no token, but RAY_AUTH_MODE=token is set here"
        for token in ({}, {"RAY_AUTH_TOKEN": "another"}):
            message = refused(cluster, checkpoint, RAY_AUTH_MODE="token", **token)
            assert message == f"{unasked}: start the cluster with RAY_AUTH_MODE=token, or unset RAY_AUTH_MODE"
        for found in check_serves(cluster, checkpoint, started):
            assert found.get("RAY_AUTH_MODE") != "token"
