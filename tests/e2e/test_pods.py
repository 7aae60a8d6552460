"""The commands, variables and hooks of the manifests start and stop a service on hosts that are namespaces."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longleaf.config import DEFAULT_PORT
from longleaf.credentials import Role, new_credential
from tests.support.manifests.kubelet import Place, RunningPod, Secrets, placing, ray_command
from tests.support.manifests.pods import groups, options, pods
from tests.support.manifests.rendering import CLOSING, render, with_these
from tests.support.manifests.secrets import closed
from tests.support.witness import Witness

OVERLAY = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "cpu"
DOCUMENTS = render(OVERLAY)
HEAD, RANKS, *_ = pods(DOCUMENTS)
NUM_PODS = groups(DOCUMENTS)["ranks"]["replicas"]
"""Number of rank pods."""
START_SECONDS = 150.0
PROBE = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    asked = health_pb2.HealthCheckRequest(service=sys.argv[2])
    answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5)
print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
"""
READER = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
TALKERS = """
import asyncio, json, sys
from longleaf.client import AsyncClient
from longleaf.errors import LongleafError

def report(what, **facts):
    print(json.dumps({"what": what, **facts}), flush=True)

async def talk(client, max_tokens):
    while True:
        begun, last = False, []
        try:
            async for event in client.generate("x", max_tokens=max_tokens, ignore_end_token=True):
                if not begun:
                    report("begun")
                begun, last = True, event
        except LongleafError as error:
            return report("broken" if begun else "refused", error=str(error))
        report(type(last).__name__, reason=last.reason, is_whole=last.usage.completion_tokens == max_tokens)

async def main():
    async with AsyncClient(sys.argv[1], retries=0) as client:
        await asyncio.gather(*(talk(client, max_tokens) for max_tokens in (23, 31, 41, 53)))

asyncio.run(main())
"""
"""Clients that query repeatedly until they are refused. Their answers have different lengths, so that some are running
whenever a drain starts, and are short enough to end within the drain time on a slow machine."""


Running = tuple[RunningPod, list[RunningPod]]


@pytest.fixture
def place() -> Iterator[Place]:
    """Creates a pod on one of the hosts that the manifests ask for."""
    with placing(1 + NUM_PODS) as place:
        yield place


@pytest.fixture
def running(place: Place) -> Running:
    """The pods of a ready service: the head and the rank pods."""
    return bring_up(place(HEAD, 0), place)


def bring_up(head: RunningPod, place: Place, credential: str = "") -> Running:
    """Starts the containers of a head and of rank pods; `credential` is that of an admin."""
    members = [place(RANKS, host) for host in range(1, 1 + NUM_PODS)]
    serve = head.start("serve")  # all containers of a pod start at once: Ray is not running yet
    start_ray(head, None)
    wait_until(head, "livenessProbe")
    assert probe(head, "readinessProbe") == "NOT_SERVING"
    for member in members:
        start_ray(member, head)
    wait_until(head, "startupProbe")
    assert f"listening on 0.0.0.0:{DEFAULT_PORT}\n" in serve.stdout  # reads up to that line
    workers = json.loads(run(head, *known(credential), "longleaf", "cluster", "--json"))["workers"]
    assert len(workers) == 4 and len({worker["node"] for worker in workers}) == len(members)
    return head, members


def start_ray(pod: RunningPod, head: RunningPod | None) -> None:
    """Starts a pod's first container and returns when its node has joined."""
    name = pod.pod.containers()[0]["name"]
    command = ray_command(pod.pod, groups(DOCUMENTS)[pod.pod.owner]["rayStartParams"], head and head.address)
    process, output = pod.start(name, command), ""
    for line in process.stdout:
        output += line
        if "Ray runtime started" in line:
            return
    raise AssertionError(output)


def probe(head: RunningPod, name: str) -> str:
    """Output of a probe of `serve`; empty if it fails."""
    requested = head.pod.container("serve")[name]["grpc"]
    command = [sys.executable, "-c", PROBE, f"{head.address}:{requested['port']}", requested["service"]]
    output, _ = head.execute("serve", command).communicate(timeout=60)
    return output.strip().rpartition("\n")[2]


def wait_until(head: RunningPod, name: str) -> None:
    """Returns when a probe succeeds."""
    deadline = time.monotonic() + START_SECONDS
    while probe(head, name) != "SERVING":
        assert head.containers["serve"].poll() is None, head.containers["serve"].stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.5)


def known(credential: str) -> list[str]:
    """Prefix of a command that needs a credential."""
    return ["env", f"LONGLEAF_CREDENTIAL={credential}"]


def run(head: RunningPod, *command: str) -> str:
    """Output of a command in the container `serve`, which must succeed."""
    process = head.execute("serve", command)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def check_streams_complete(reports: list[dict]) -> None:
    """Checks that every started answer is complete, and that some ended after the first client was refused."""
    what = [one["what"] for one in reports]
    assert what.count("begun") == what.count("Finished") and "broken" not in what, reports[-20:]
    assert all((one["reason"], one["is_whole"]) == ("length", True) for one in reports if one["what"] == "Finished")
    first = what.index("refused")
    assert "accepts no new calls" in reports[first]["error"]  # later clients may be refused
    assert "Finished" in what[first:], "no answer was running when the drain started"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_complete_when_all_pods_stop_at_once(running: Running):
    head, members = running
    talkers = head.execute("serve", [sys.executable, "-c", TALKERS, f"{head.address}:{DEFAULT_PORT}"])
    lines = [talkers.stdout.readline()]  # the first answer has started
    containers = [(pod, name) for pod in (head, *members) for name in pod.containers]
    with ThreadPoolExecutor(len(containers)) as kubelets:
        stopped = {(pod.pod.owner, name): kubelets.submit(pod.stop, name) for pod, name in containers}
        lines += talkers.stdout.readlines()
        codes = {container: stop.result() for container, stop in stopped.items()}
    assert talkers.wait(timeout=60) == 0, lines
    check_streams_complete([json.loads(line) for line in lines])
    assert 0 in {codes["head", "serve"][0], codes["head", "ray-head"][0]}
    assert codes["head", "serve"][1] == 0


@pytest.fixture
def secrets(tmp_path: Path) -> tuple[Secrets, dict[Role, str]]:
    """The Secrets of a secured service, and a credential of each role."""
    return closed(tmp_path / "authority")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_secured_pods_authenticate_clients_export_metrics_and_stop_by_their_hooks(
    place: Place, secrets: tuple[Secrets, dict[Role, str]], tmp_path: Path
):
    (tmp_path / "closed").mkdir()
    documents = with_these(tmp_path / "closed", "cpu", ["certificates", "credentials", "monitoring"], CLOSING)
    reported, credentials = secrets
    head, _ = bring_up(place(pods(documents)[0], 0, reported), place, credentials["admin"])
    assert probe(head, "livenessProbe") == probe(head, "readinessProbe") == "SERVING"
    for environment in ([], ["env", "LONGLEAF_TLS_CA="], known(new_credential()), known(credentials["user"])):
        intruder = head.execute("serve", [*environment, "longleaf", "drain"])
        output, _ = intruder.communicate(timeout=60)
        assert intruder.returncode != 0, output
    port = options(head.pod.container("serve"))["metrics-port"]
    assert "longleaf_build_info{" in run(head, sys.executable, "-c", READER, f"http://{head.address}:{port}/metrics")
    talkers = head.execute(
        "serve", [*known(credentials["user"]), sys.executable, "-c", TALKERS, f"localhost:{DEFAULT_PORT}"]
    )
    lines = [talkers.stdout.readline()]
    with ThreadPoolExecutor(2) as kubelets:
        stops = [kubelets.submit(head.stop, name) for name in head.containers]
        lines += talkers.stdout.readlines()
        codes = {name: stop.result() for name, stop in zip(head.containers, stops, strict=True)}
    assert talkers.wait(timeout=60) == 0, lines
    check_streams_complete([json.loads(line) for line in lines])
    assert 0 in {codes["serve"][0], codes["ray-head"][0]}
    assert codes["serve"][1] == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_service_recovers_when_a_rank_pod_is_lost_and_recreated(running: Running, place: Place):
    head, members = running
    with Witness(f"{head.address}:{DEFAULT_PORT}", head.inside) as observer:
        observer.under_way()
        members[0].delete()
        num_lost = 4 // NUM_PODS
        observer.cluster(lambda found: found["world_size"] == 4 - num_lost)
        observer.under_way()
        start_ray(place(RANKS, 1), head)
        found = observer.healed(4, num_lost)
        assert len({worker["node"] for worker in found["workers"]}) == NUM_PODS
        observer.under_way()
        observer.check()
    assert probe(head, "readinessProbe") == probe(head, "livenessProbe") == "SERVING"
    hook, code = head.stop("serve")
    assert (hook, code) == (0, 0)


def test_pre_stop_hook_of_a_rank_pod_returns_after_its_ranks_exit(tmp_path):
    """The hook recognises ranks by the process name that Ray sets."""
    *shell, text = RANKS.containers()[0]["lifecycle"]["preStop"]["exec"]["command"]
    (tmp_path / "17").mkdir()
    (name := tmp_path / "17" / "cmdline").write_bytes(b"ray::WorkerActor.run\0")
    hook = subprocess.Popen([*shell, text.replace("/proc", shlex.quote(str(tmp_path)))])
    with pytest.raises(subprocess.TimeoutExpired):
        hook.wait(timeout=0.5)
    name.write_bytes(b"ray::IDLE\0")
    assert hook.wait(timeout=60) == 0
