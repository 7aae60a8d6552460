"""A service on two hosts, which are network namespaces: the ranks find each other without configuration."""

import subprocess
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_failures import check_ended_with_reason, start_stream
from tests.support.command_line import CLI, Served
from tests.support.network.ray_nodes import SLOTS, RayNodes, ray_nodes
from tests.support.witness import Witness

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.timeout(600)]
OPTIONS = ("--kv-bytes", "80000000")
RECOVERY_LINES = ("lost member ", "started member ", "member ", "epoch ", "recover")
"""Start of a log line about a lost rank."""
WARNINGS = ("rank ",)
"""Start of the log lines of ranks that notice the loss before the coordinator."""


def serve(nodes: RayNodes, checkpoint: Path, world_size: int, *more: str) -> Served:
    """A service whose coordinator is on the first host."""
    here = nodes.on(0)
    options = (
        "--model",
        str(checkpoint),
        *OPTIONS,
        "--world-size",
        str(world_size),
        "--ray-address",
        nodes.address,
        *more,
    )
    return Served(*options, before=here, beside=here)


def answer(service: Served, folder: Path) -> str:
    """The model's answer to a question about a document."""
    (document := folder / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long. " * 40)
    service.json("ingest", str(document), "--name", "book")
    return service.run("ask", "book", "Who?", "--max-tokens", "24", "--temperature", "0").stdout


def check_together(nodes: RayNodes, service: Served, sizes: list[int]) -> None:
    """This number of ranks on each host, with shared memory inside and gloo between hosts, is as exact as one rank."""
    found = service.json("cluster")
    workers = found["workers"]
    assert sorted(Counter(worker["node"] for worker in workers).values()) == sizes
    assert {worker["address"] for worker in workers} == set(nodes.network.addresses)
    assert (found["inside_transport"], found["between_transport"]) == ("shared_memory", "gloo")
    chosen = [timing["merge"] for timing in found["merge_timings"]]
    reported = [("exchange", "gather") if merge == "hierarchy" else ("", merge) for merge in chosen]
    assert [(tier["inside"], tier["between"]) for tier in found["tier_merges"]] == reported
    verified = service.run("verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.startswith("passed: ")


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of a single host."""
    with Served("--model", str(checkpoint), "--kv-bytes", "8000000", "--launcher", "local") as alone:
        return answer(alone, tmp_path_factory.mktemp("alone"))


def test_two_ranks_on_each_of_two_hosts_answer_like_one_rank(
    nodes: RayNodes, checkpoint: Path, tmp_path: Path, expected: str, started: ExitStack
):
    with serve(nodes, checkpoint, 2 * SLOTS) as service:
        assert answer(service, tmp_path) == expected != ""
        check_together(nodes, service, [SLOTS, SLOTS])
        assert "shared_memory inside nodes, gloo between 2 nodes x 2 ranks = 4" in service.run("cluster").stdout
        check_second_coordinator_is_refused(nodes, checkpoint)
        processes = nodes.service()
        message = "ranks, coordinator, the command that started it, and the template renderer"
        assert len(processes) == 2 * SLOTS + 3, message
        check_a_lost_rank_is_replaced(nodes, service)
        stream = start_stream(service, started, nodes.on(0))
        assert service.stop() == 0
        check_ended_with_reason(service, stream, RECOVERY_LINES, WARNINGS)
        assert psutil.wait_procs(nodes.service(), timeout=20)[1] == []


def check_a_lost_rank_is_replaced(nodes: RayNodes, service: Served) -> None:
    """Loss of whole hosts: test_hosts_lost."""
    with Witness(service.address, nodes.on(0)) as observer:
        observer.under_way()
        nodes.kill(1, "ray::WorkerActo")
        [loss] = observer.healed(2 * SLOTS, 1)["losses"]
        assert loss["rank"] in (2, 3)
        observer.check()


def check_second_coordinator_is_refused(nodes: RayNodes, checkpoint: Path) -> None:
    options = ["--model", str(checkpoint), "--port", "0", "--ray-address", nodes.address]
    command = [*nodes.on(0), *CLI, "serve", *options]
    second = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert second.returncode == 2
    message = "error: --ray-address: this Ray cluster already runs a coordinator; it can run only one"
    assert second.stderr.splitlines()[1:] == [message]


@pytest.mark.slow
def test_hosts_may_have_different_numbers_of_ranks(nodes: RayNodes, checkpoint: Path, tmp_path: Path, expected: str):
    with serve(nodes, checkpoint, SLOTS + 1) as service:
        assert answer(service, tmp_path) == expected != ""
        check_together(nodes, service, [1, SLOTS])
        assert service.stop() == 0


@pytest.mark.slow
def test_hosts_may_have_ipv6_addresses(checkpoint: Path, tmp_path: Path, expected: str):
    with ray_nodes(6) as nodes, serve(nodes, checkpoint, 2 * SLOTS) as service:
        assert answer(service, tmp_path) == expected != ""
        check_together(nodes, service, [SLOTS, SLOTS])
        assert service.stop() == 0
