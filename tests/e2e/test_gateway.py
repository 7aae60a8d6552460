"""A service with an HTTP gateway."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import psutil
import pytest
from openai import OpenAI

from longleaf.client import Client
from longleaf.types import Delta
from tests.support import forked
from tests.support.command_line import CLI, Served, url_of
from tests.support.gateway_fakes import Behind

LAUNCHERS = ("local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended]))
BOOK = "The door of the house is green. " * 40
QUESTION = "What colour is the door?"


def gateways_of(served: Served) -> list[psutil.Process]:
    everybody = psutil.Process(served.process.pid).children(recursive=True)
    return [each for each in everybody if _has_parent(each.cmdline())]


def _has_parent(command: list[str]) -> bool:
    """Whether this is the command of a gateway that a service started."""
    return any('"with_parent": true' in word for word in command)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--launcher", "local", "--http", "0", "--kv-bytes", "60000000") as service:
        yield service
        assert service.stop() == 0


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    url = url_of(served)
    path = f"{url}/v1/contexts/book"
    answer = httpx2.post(path, content=BOOK.encode(), headers={"content-type": "text/plain"}, timeout=60)
    assert answer.status_code == 200 and '"ready"' in answer.text
    return url


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=str)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_gateway_answers_equal_those_of_ask(
    served: Served, url: str, options: dict[str, Any], is_streamed: bool
) -> None:
    with Client(served.address) as client:
        events = client.ask("book", QUESTION, max_tokens=24, **options)
        requested = "".join(event.text for event in events if isinstance(event, Delta))
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        create: Any = client.chat.completions.create
        model = client.models.list().data[1].id
        answer = create(model=model, messages=messages, max_tokens=24, stream=is_streamed, **options)
        if is_streamed:
            text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
        else:
            text = answer.choices[0].message.content
            assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert text == requested


def test_crashed_gateway_is_restarted(served: Served, url: str) -> None:
    (gateway,) = gateways_of(served)
    gateway.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            assert httpx2.get(f"{url}/readyz").status_code == 200
            break
        except httpx2.TransportError:
            continue
    (other,) = gateways_of(served)
    assert other.pid != gateway.pid


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_gateway_exits_with_its_service(launcher: Literal["local", "ray"]) -> None:
    with Served("--launcher", launcher, "--http", "0", "--kv-bytes", "8000000") as service:
        url = url_of(service)
        assert httpx2.get(f"{url}/readyz").status_code == 200
        here = [p for p in psutil.process_iter(["cmdline"]) if _has_parent(p.info["cmdline"] or [])]
        mine = [p for p in here if _listens(p, url)]
        assert len(mine) == 1
        parent = mine[0].parent()
        assert parent is not None
        os.kill(parent.pid, signal.SIGKILL)
        assert not psutil.wait_procs(mine, timeout=30)[1]


def _listens(process: psutil.Process, url: str) -> bool:
    port = int(url.rpartition(":")[2])
    return any(each.laddr.port == port for each in process.net_connections() if each.status == psutil.CONN_LISTEN)


def test_gateway_reconnects_after_its_service_restarts() -> None:
    with Behind("--kv-bytes", "60000000") as behind, httpx2.Client(base_url=behind.url, timeout=60) as client:

        def ask() -> httpx2.Response:
            body = {"model": "lookup", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
            return client.post("/v1/chat/completions", json=body)

        first = ask().json()
        endless = {"model": "lookup", "prompt": "a", "stream": True, "logit_bias": {"257": -100}}
        with client.stream("POST", "/v1/completions", json=endless) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            behind.lose_service()
            printed = [line for line in lines if line]
        assert printed[-2] == "event: error" and '"code":"unavailable"' in printed[-1]
        for _ in range(3):
            gone, readiness = ask(), client.get("/readyz")
            assert (gone.status_code, readiness.status_code) == (503, 503)
            assert gone.headers["retry-after"] and gone.json()["error"]["code"] == "unavailable"
        behind.find_service()
        behind.wait(lambda: ask().status_code == 200)
        again = ask().json()
        assert again["choices"] == first["choices"]
        assert client.get("/readyz").status_code == 200


def test_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = forked.run([*CLI, "serve", "--port", "0", "--launcher", "local", "--http", port])
    assert result.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_standalone_gateway_prints_its_address_and_exits_on_a_signal() -> None:
    process = forked.popen([*CLI, "gateway", "--port", "0", "--json"], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["http"]
        assert httpx2.get(f"{url}/healthz").status_code == 200
        process.terminate()
        assert process.wait(30) == 0
    refused = forked.run([*CLI, "gateway", "--host", "0.0.0.0"])
    assert refused.returncode == 2 and "--insecure" in refused.stderr


MAX_TOKENS = 4000


def test_disconnected_client_ends_the_generation_within_few_tokens() -> None:
    """Counts the tokens that are generated after the last read one until the row is free. One token per step: drafts
    would add accepted tokens."""
    options = ("--launcher", "local", "--http", "0", "--kv-bytes", "60000000", "--metrics-port", "0")
    options += ("--max-draft-tokens", "0")
    with Served(*options) as service, Client(service.address) as client:
        found = re.search(r"metrics are at (\S+)", service.output)
        assert found is not None

        def num_generated() -> int:
            lines = httpx2.get(found[1]).text.splitlines()
            (line,) = [line for line in lines if line.startswith("longleaf_generated_tokens_total")] or ["0 0"]
            return int(float(line.split()[-1]))

        requested = {"model": "lookup", "prompt": "a", "stream": True, "max_tokens": MAX_TOKENS, "logprobs": 0}
        requested["logit_bias"] = {str(token): -100 for token in range(256, 264)}  # it does not exit without a signal
        with httpx2.stream("POST", f"{url_of(service)}/v1/completions", json=requested, timeout=60) as stream:
            lines, num_read = stream.iter_lines(), 0
            while num_read < 20:
                if (line := next(lines)).startswith("data: {"):
                    logprobs = json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]
                    num_read += len(logprobs["tokens"])
        deadline = time.monotonic() + 60
        while client.cluster().running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert num_generated() - num_read < MAX_TOKENS // 16
        assert service.stop() == 0
