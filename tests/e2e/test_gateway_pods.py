"""A gateway pod from the manifests in front of a service on another host; hosts are network namespaces. The service is
the head's container `serve` with local ranks, without Ray."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from longleaf.credentials import new_credential
from tests.support.manifests.kubelet import NO_SECRETS, Place, RunningPod, Secrets, placing
from tests.support.manifests.pods import GATEWAY, of_kind, options, pods
from tests.support.manifests.rendering import CLOSING, with_these
from tests.support.manifests.secrets import closed

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
SERVICES = {"longleaf": 0, GATEWAY: 1}
"""Host of each kind of pod."""
SECONDS = 60.0
OF_SECURITY = ("--tls-cert=", "--tls-key=", "--credentials=", "--insecure")
PROBE = """
import ssl, sys, urllib.error, urllib.request
unverified = ssl._create_unverified_context()  # as a kubelet
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=5, context=unverified).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""
CLIENT = """
import json, os, ssl, sys, urllib.error, urllib.request
url, credential, body = sys.argv[1:]
authority = os.environ.get("LONGLEAF_TLS_CA")
context = ssl.create_default_context(cafile=authority) if authority else None
headers = {"content-type": "application/json"} | ({"authorization": "Bearer " + credential} if credential else {})
asked = urllib.request.Request(url, body.encode() or None, headers)
try:
    with urllib.request.urlopen(asked, timeout=60, context=context) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.load(error)]))
"""
UPLOADER = """
import http.client, os, socket, ssl, sys, time
host, port, credential = sys.argv[1], int(sys.argv[2]), sys.argv[3]
authority, half = os.environ.get("LONGLEAF_TLS_CA"), b"Call me Ishmael. " * 20
if authority:
    there = http.client.HTTPSConnection(host, port, context=ssl.create_default_context(cafile=authority))
else:
    there = http.client.HTTPConnection(host, port)
there.putrequest("POST", "/v1/contexts/held")
for name, value in {"content-type": "text/plain", "content-length": str(2 * len(half))}.items():
    there.putheader(name, value)
if credential:
    there.putheader("authorization", "Bearer " + credential)
there.endheaders(half)
answer = there.getresponse()
print(answer.status, flush=True)
while True:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        break
    time.sleep(0.1)
there.send(half)
print(answer.read().decode(), flush=True)
"""
"""Sends the second half of a document once the gateway accepts no new callers."""


@dataclass
class Running:
    """The pods of a head and a gateway, and the settings of callers. The head pod starts empty."""

    head: RunningPod
    gateway: RunningPod
    url: str
    credential: str = ""

    def start_gateway(self) -> None:
        process = self.gateway.start("gateway")
        assert any(line.startswith("listening on ") for line in process.stdout)  # reads up to that line

    def start_service(self) -> None:
        given = [word for word in self.head.pod.container("serve")["args"] if word.startswith(OF_SECURITY)]
        ranks = ["--launcher=local", "--world-size=1", "--host=0.0.0.0"]
        process = self.head.start("serve", ["longleaf", "serve", *ranks, *given])
        assert any(line.startswith("listening on ") for line in process.stdout)

    def probe(self, name: str) -> int:
        """The HTTP status that a kubelet gets; 0 if none."""
        container = self.gateway.pod.container("gateway")
        requested = container[name]["httpGet"]
        (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == requested["port"]]
        scheme = requested.get("scheme", "HTTP").lower()
        url = f"{scheme}://{self.gateway.address}:{port}{requested['path']}"
        return int(_output_of(self.gateway.execute("gateway", [sys.executable, "-c", PROBE, url])))

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while self.probe("readinessProbe") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def ask(self, path: str, body: str = "", credential: str | None = None) -> tuple[int, dict]:
        """Response to a client on the head's host."""
        shown = self.credential if credential is None else credential
        command = [sys.executable, "-c", CLIENT, f"{self.url}{path}", shown, body]
        status, answer = json.loads(_output_of(self.head.execute("serve", command)))
        return status, answer

    def metrics(self) -> str:
        reader = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
        port = options(self.gateway.pod.container("gateway"))["metrics-port"]
        url = f"http://{GATEWAY}:{port}/metrics"
        return _output_of(self.head.execute("serve", [sys.executable, "-c", reader, url]))


def _output_of(process) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output.strip()


@pytest.fixture
def place() -> Iterator[Place]:
    with placing(2, SERVICES) as place:
        yield place


@pytest.fixture(params=["open", "closed"])
def running(request: pytest.FixtureRequest, place: Place, tmp_path: Path) -> Running:
    """Both pods, from the smallest overlay and with authentication and metrics."""
    (tmp_path / "mine").mkdir()
    secrets: Secrets = NO_SECRETS
    if request.param == "open":
        documents, credential = with_these(tmp_path / "mine", "cpu", ["monitoring"]), ""
    else:
        components = ["certificates", "credentials", "monitoring"]
        documents = with_these(tmp_path / "mine", "cpu", components, CLOSING)
        secrets, credentials = closed(tmp_path / "authority")
        credential = credentials["user"]
    by_owner = {pod.owner: pod for pod in pods(documents)}
    (port,) = [one["spec"]["ports"][0] for one in of_kind(documents, "Service") if one["metadata"]["name"] == GATEWAY]
    url = f"{port['appProtocol']}://{GATEWAY}:{port['port']}"
    return Running(place(by_owner["head"], 0, secrets), place(by_owner[GATEWAY], 1, secrets), url, credential)


def test_gateway_pod_serves_requests_and_drains_running_streams(running: Running):
    running.start_gateway()  # the gateway may start before the service
    assert (running.probe("livenessProbe"), running.probe("readinessProbe")) == (200, 503)
    running.start_service()
    running.wait_ready()
    check_who_comes_in(running)
    host, port = running.url.rpartition("/")[2].split(":")
    uploader = running.head.execute("serve", [sys.executable, "-c", UPLOADER, host, port, running.credential])
    assert uploader.stdout.readline() == "200\n"
    assert "\nlongleaf_gateway_streams 1.0\n" in running.metrics()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as kubelet:
        stopped = kubelet.submit(running.gateway.stop, "gateway")
        output = uploader.stdout.read()
        assert stopped.result() == (0, 0)
    assert uploader.wait(timeout=60) == 0 and '"phase":"ready"' in output, output
    drain = float(options(running.gateway.pod.container("gateway"))["drain-seconds"])
    assert time.monotonic() - began < drain  # it ended with its last stream, not at its time limit


def check_who_comes_in(running: Running) -> None:
    """Checks which credentials the service accepts through the gateway."""
    if running.credential:
        for shown in ("", new_credential()):
            status, answer = running.ask("/v1/models", credential=shown)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, answer = running.ask("/v1/models")
    assert status == 200
    question = {"model": answer["data"][0]["id"], "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    status, answer = running.ask("/v1/chat/completions", json.dumps(question))
    assert status == 200 and answer["object"] == "chat.completion"
    assert 'longleaf_gateway_requests_total{code="200",method="GET",route="/v1/models"} 1.0' in running.metrics()
