"""Gateways with wrong TLS settings for their service: the log gives the operator the reason, and a caller gets an
unavailable error."""

import logging
from asyncio import create_subprocess_exec, subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coordinator.grpc_server.certificates import Certificates
from gateway.server import serve
from longleaf.credentials import new_credential
from longleaf.errors import InvalidArgument
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig, SecurityConfig
from tests.support.authority import Authority
from tests.support.gateways import opened
from tests.support.service import FakeEngine, serving

CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/v1/chat/completions", {"json": {"model": "fake", "messages": [{"role": "user", "content": "Who?"}]}}),
    ("POST", "/v1/completions", {"json": {"model": "fake", "prompt": "Who?", "stream": True}}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/fake", {}),
    ("GET", "/v1/contexts", {}),
    ("GET", "/v1/contexts/book", {}),
    ("PATCH", "/v1/contexts/book", {"json": {"pinned": True}}),
    ("DELETE", "/v1/contexts/book", {}),
    ("POST", "/v1/contexts/book/fork", {"json": {"id": "half"}}),
    ("HEAD", "/v1/contexts/book?upload_id=u", {}),
    ("POST", "/v1/contexts/book?upload_id=u", {"content": b"x", "headers": {"content-type": "text/plain"}}),
    ("GET", "/v1/cluster", {}),
    ("GET", "/v1/cluster?once=true", {}),
    ("GET", "/readyz", {}),
)


class Files:
    """A certificate authority, and another one that is not trusted."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.theirs = Authority(folder / "ours"), Authority(folder / "theirs")

    @asynccontextmanager
    async def service(self, folder: Path, kind: str) -> AsyncIterator[str]:
        cert, key = map(str, self.ours.write("service"))
        client_ca = str(self.ours.file) if kind == "mutual" else None
        config = SecurityConfig(tls_cert=cert, tls_key=key, tls_client_ca=client_ca)
        options = {} if kind == "plain" else {"certificates": Certificates.from_config(config)}
        host = "127.0.0.2" if kind == "elsewhere" else "127.0.0.1"
        async with serving(FakeEngine(), folder, host, **options) as (_, address):
            yield address

    def tls_options(self, kind: str) -> dict[str, Any]:
        """The TLS options of a gateway."""
        ours, theirs = str(self.ours.file), str(self.theirs.file)
        cert, key = map(str, self.theirs.write("gateway"))
        found: dict[str, dict[str, Any]] = {
            "nothing": {},
            "ours": {"tls_ca": ours},
            "theirs": {"tls_ca": theirs},
            "another's": {"tls_ca": ours, "server_tls_cert": cert, "server_tls_key": key},
        }
        return found[kind]


@pytest.mark.parametrize(
    ("service", "message", "why"),
    [
        ("encrypted", "nothing", "requires TLS"),
        ("encrypted", "theirs", "not signed by an authority"),
        ("plain", "ours", "serves plain connections"),
        ("mutual", "ours", "client certificate"),
        ("mutual", "another's", "client certificate"),
        ("elsewhere", "ours", "for another name"),
    ],
)
async def test_callers_get_unavailable_and_operators_get_the_reason(
    service: str, message: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, credential = Files(tmp_path), new_credential()
    caplog.set_level(logging.WARNING, "gateway")
    async with files.service(tmp_path / "model", service) as address:
        bearer = {"authorization": f"Bearer {credential}"}
        async with (
            opened(address, **files.tls_options(message)) as url,
            httpx2.AsyncClient(base_url=url, timeout=20) as client,
        ):
            for method, path, sent in CALLS:
                sent = sent | {"headers": sent.get("headers", {}) | bearer}
                answer = await client.request(method, path, **sent)
                assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), (path, answer.text)
                if method != "HEAD":
                    error = answer.json()["error"]
                    assert (error["type"], error["code"], error["param"]) == ("server_error", "unavailable", None)
                for secret in (address, address.rpartition(":")[2], str(tmp_path), "LONGLEAF", "TLS", credential):
                    assert secret not in answer.text, path
            assert (await client.get("/healthz")).status_code == 200
    assert why in caplog.text and credential not in caplog.text


async def test_operator_log_has_the_reason_once(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with files.service(tmp_path / "model", "encrypted") as address:
        command = gateway_command(GatewayConfig(server=address, port=0, tls_ca=str(files.theirs.file)))
        gateway = await create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert gateway.stdout is not None
        url = (await gateway.stdout.readline()).decode().removeprefix("listening on ").strip()
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(5):
                assert (await client.get("/v1/models")).status_code == 503
        gateway.terminate()
        _, output = await gateway.communicate()
    (line,) = output.decode().splitlines()
    assert "not signed by an authority" in line and "the service cannot be reached" in line


async def test_unusable_files_prevent_the_start(tmp_path: Path) -> None:
    files = Files(tmp_path)
    cert, key = map(str, files.ours.write("one"))
    empty = tmp_path / "empty.pem"
    empty.touch()
    for settings, field in (
        ({"tls_ca": str(tmp_path / "none.pem")}, "tls_ca"),
        ({"tls_ca": str(empty)}, "tls_ca"),
        ({"tls_ca": key}, "tls_ca"),
        ({"server_tls_cert": cert, "server_tls_key": key}, "tls_cert"),
        ({"tls_ca": cert, "server_tls_cert": cert}, "tls_cert"),
        ({"tls_ca": cert, "server_tls_cert": str(empty), "server_tls_key": key}, "tls_cert"),
        ({"tls_ca": cert, "server_tls_cert": cert, "server_tls_key": cert}, "tls_key"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            await serve(GatewayConfig(server="127.0.0.1:1", port=0, **settings), lambda *_: None)  # type: ignore[arg-type]
        assert raised.value.field == field, settings
