"""Loss of a host: a running service continues and takes it back; a starting service names it and leaves no
processes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_growing_cluster import read_to, start
from tests.e2e.test_hosts import OPTIONS, serve
from tests.support.command_line import CLI
from tests.support.network.ray_nodes import SLOTS, RayNodes
from tests.support.witness import Witness

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def hurt(nodes: RayNodes) -> Iterator[RayNodes]:
    """The cluster; its second node is restarted after the test."""
    yield nodes
    nodes.start(1)


def cut(nodes: RayNodes) -> None:
    nodes.cut()


def kill_raylet(nodes: RayNodes) -> None:
    nodes.kill(1, "raylet")


@pytest.mark.parametrize("hurting", [kill_raylet, cut])
def test_service_continues_without_a_lost_host_and_takes_it_back(
    hurt: RayNodes, checkpoint: Path, hurting: Callable[[RayNodes], None]
):
    with serve(hurt, checkpoint, 2 * SLOTS, "--heartbeat-timeout", "3") as service:
        num_processes, [here, away] = len(hurt.service()), hurt.network.addresses
        with Witness(service.address, hurt.on(0)) as observer:
            [node] = {one["node"] for one in service.json("cluster")["workers"] if one["address"] == away}
            observer.under_way()
            hurting(hurt)
            found = observer.cluster(lambda found: found["world_size"] == SLOTS)
            assert {worker["address"] for worker in found["workers"]} == {here}
            for _ in range(2):
                observer.under_way()
            hurt.mend() if hurting is cut else hurt.start(1)
            found = observer.healed(2 * SLOTS, SLOTS)
            assert {worker["address"] for worker in found["workers"]} == {here, away}
            assert [(loss["rank"] in (2, 3), loss["node"]) for loss in found["losses"]] == [(True, node)] * SLOTS
            observer.under_way()
            observer.check()
        processes = hurt.service()
        assert len(processes) == num_processes, "processes of the lost ranks remain"
        assert service.stop() == 0
        assert psutil.wait_procs(processes, timeout=20)[1] == []


def check_named(nodes: RayNodes, message: str) -> None:
    """One of the second host's ranks is named with its node."""
    assert message.startswith(("error: rank 2 was lost: ", "error: rank 3 was lost: "))
    assert ", on node " in message and f"({nodes.network.addresses[1]})" in message


@pytest.mark.parametrize("name", ["ray::IDLE", "ray::WorkerActo"])
def test_host_lost_while_its_ranks_start_is_named(hurt: RayNodes, checkpoint: Path, started: ExitStack, name: str):
    """Ray would place ranks that have not started elsewhere."""
    options = ["--model", str(checkpoint), *OPTIONS, "--world-size", str(2 * SLOTS), "--ray-address", hurt.address]
    service, _ = start(started, [*hurt.on(0), *CLI, "serve", "--port", "0", *options], "starting ")
    while not hurt.runs(1, name):
        assert service.poll() is None
    processes = hurt.service()
    hurt.kill(1, "raylet")
    output, _ = service.communicate(timeout=200)
    assert service.returncode == 1
    [line] = output.splitlines()
    check_named(hurt, line)
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_host_lost_before_the_last_rank_arrives_is_waited_for(hurt: RayNodes, checkpoint: Path, started: ExitStack):
    options = ["--model", str(checkpoint), *OPTIONS, "--world-size", str(2 * SLOTS + 1), "--ray-address", hurt.address]
    command = [*hurt.on(0), *CLI, "serve", "--port", "0", *options, "--wait-for-ranks", "300"]
    service, _ = start(started, command, "waiting for 1 of 5 slots")
    hurt.kill(1, "raylet")
    read_to(service, "waiting for 3 of 5 slots")
    hurt.start(1, slots=SLOTS + 1)
    read_to(service, "listening on ")
    processes = hurt.service()
    service.terminate()
    assert service.wait(timeout=60) == 0
    assert psutil.wait_procs(processes, timeout=20)[1] == []
