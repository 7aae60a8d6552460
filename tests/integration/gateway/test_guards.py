"""The callers that the gateway accepts, and its responses to browsers."""

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest

from coordinator.auth.credentials import Credentials
from gateway import protocol
from gateway.server import listen
from longleaf.credentials import CredentialEntry, digest_of, line_of, new_credential
from longleaf.errors import InvalidArgument, StartError
from longleaf.reloading_files import LOOK_SECONDS
from longleaf.service_settings import GatewayConfig, HttpConfig, SecurityConfig
from tests.support.authority import Authority
from tests.support.gateways import opened
from tests.support.service import FakeEngine, Served, serving


async def test_foreign_hosts_and_origins_are_refused(service: Served) -> None:
    cases = (
        ({"host": "127.0.0.1:1"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "books.example"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
        ({"host": "localhost:8", "origin": "http://localhost"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "https://books.example"}, 200),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
    )
    gateway = opened(service.address, public_url="https://books.example")
    async with gateway as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for headers, status in cases:
            assert (await client.get("/v1/models", headers=headers)).status_code == status, headers


async def test_every_response_has_browser_security_headers(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path in ("/", "/v1/models", "/nothing", "/page/..%2fapp.py"):
            answer = await client.get(path)
            is_page = answer.headers["content-type"].startswith("text/html")
            assert ("frame-ancestors 'none'" in answer.headers.get("content-security-policy", "")) == is_page
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "cache-control" in answer.headers
        assert (await client.get("/page/..%2fapp.py")).status_code == 404
        assert (await client.put("/v1/models")).status_code == 405


async def test_cross_site_browser_requests_get_only_the_page(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path, site, status in (
            ("/v1/models", "cross-site", 403),
            ("/v1/models", "same-site", 403),  # another port of this machine
            ("/v1/contexts/x?upload_id=u", "same-site", 403),
            ("/v1/models", "same-origin", 200),
            ("/v1/models", "none", 200),
            ("/", "cross-site", 200),
        ):
            assert (await client.get(path, headers={"sec-fetch-site": site})).status_code == status, (path, site)


CHAT = "https://chat.example"


async def test_pages_of_allowed_origins_may_call_and_no_others(service: Served) -> None:
    service.engine.answer = ((104,), (105,))
    body = {"model": "model", "messages": [{"role": "user", "content": "Who?"}]}
    gateway = opened(service.address, allow_origin=(CHAT, "http://localhost:3000"))
    async with gateway as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
        for origin in (CHAT, "http://localhost:3000"):
            browser = {"origin": origin, "sec-fetch-site": "cross-site"}
            for answer in (
                await client.get("/v1/models", headers=browser),
                await client.post("/v1/chat/completions", json=body, headers=browser),
                await client.post("/v1/chat/completions", json=body | {"stream": True}, headers=browser),
            ):
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
                assert "origin" in answer.headers["vary"].lower()
                assert "access-control-allow-credentials" not in answer.headers
                assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.text.endswith("data: [DONE]\n\n")
        for origin in (f"{CHAT}:8443", "http://chat.example", "https://evil.chat.example", "null", "http://localhost"):
            refused = await client.get("/v1/models", headers={"origin": origin, "sec-fetch-site": "cross-site"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin"), origin
            assert "access-control-allow-origin" not in refused.headers
        assert (await client.get("/v1/models", headers={"sec-fetch-site": "cross-site"})).status_code == 403


async def test_pages_of_allowed_origins_can_read_errors(service: Served) -> None:
    gateway = opened(service.address, allow_origin=(CHAT,))
    async with gateway as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path, headers, status in (
            ("/v1/nothing", {}, 404),
            ("/v1/contexts/none", {}, 404),
            ("/v1/models", {"host": "evil.example"}, 421),
        ):
            answer = await client.get(path, headers={"origin": CHAT, **headers})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, CHAT)
            assert "retry-after" in answer.headers["access-control-expose-headers"]
            assert answer.json()["error"]["message"]


async def test_pages_of_allowed_origins_can_read_errors_before_routing(service: Served) -> None:
    """The head may be too long before its Origin arrives: a single allowed origin is then assumed."""
    other = "http://localhost:3000"
    long, many = f"x: {'x' * 99_999}\r\n", "".join(f"x-{i}: 1\r\n" for i in range(200))
    for origins, lines, status, allowed in (
        ((CHAT, other), f"origin: {CHAT}\r\n{long}", 431, CHAT),
        ((CHAT, other), f"Origin: {other}\r\n{many}", 431, other),
        ((CHAT,), f"{many}origin: {CHAT}\r\n", 431, CHAT),
        ((CHAT, other), f"{many}origin: {CHAT}\r\n", 431, None),
        ((CHAT,), f"origin: https://evil.example\r\n{many}", 431, None),
        ((), f"origin: {CHAT}\r\n{many}", 431, None),
    ):
        async with opened(service.address, allow_origin=origins) as url:
            headers = await refused_headers(url, lines, status)
            assert headers.get("access-control-allow-origin") == allowed
            assert ("retry-after" in headers.get("access-control-expose-headers", "")) == (allowed is not None)
    async with opened(service.address, allow_origin=(CHAT,), max_connections=1) as url:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.get("/healthz")).status_code == 200  # its connection stays open
            headers = await refused_headers(url, f"origin: {CHAT}\r\n", 503)
        assert (headers["access-control-allow-origin"], headers["retry-after"]) == (CHAT, "1")


async def refused_headers(url: str, lines: str, status: int) -> dict[str, str]:
    """The headers of the answer to a request with these header lines, which has this status."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    first, *found = head.strip().split("\r\n")
    assert first.split()[1] == str(status), head
    return dict(line.split(": ", 1) for line in found)


async def test_preflight_requests_of_allowed_origins_are_answered(service: Served) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        "access-control-request-private-network": "true",
        "sec-fetch-site": "cross-site",
    }
    gateway = opened(service.address, allow_origin=(CHAT,))
    async with gateway as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        found = await client.options("/v1/chat/completions", headers=asked | {"origin": CHAT})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, CHAT)
        assert found.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        assert "PATCH" in found.headers["access-control-allow-methods"]
        assert found.headers["access-control-max-age"] == "600"
        refused = await client.options("/v1/chat/completions", headers=asked | {"origin": "https://evil.example"})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
    async with opened(service.address) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        refused = await client.options("/v1/chat/completions", headers=asked | {"origin": CHAT})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("*", "lower case"),
        ("null", "lower case"),
        ("https://chat.example/", "without a path"),
        ("https://*.example", "wildcards"),
        ("https://Chat.example", "lower case"),
        ("chat.example", "SCHEME://HOST"),
        ("https://chat.example:443", "browsers omit the port 443"),
    ],
)
def test_only_exact_origins_can_be_allowed(origin: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"allow_origin: .*{message}"):
        GatewayConfig(allow_origin=(CHAT, origin)).check()
    with pytest.raises(InvalidArgument, match=f"allow_origin: .*{message}"):
        HttpConfig(http=0, allow_origin=f"{CHAT},{origin}").check(SecurityConfig())
    GatewayConfig(allow_origin=(CHAT, "http://[::1]:3000", "app://obsidian.md")).check()


async def test_no_page_path_causes_a_500(url: str) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    for path, status in (
        ("/page/nonexist/../index.html", b"200"),
        ("/page/../static.py", b"404"),
        ("/page/../../pyproject.toml", b"404"),
        ("/page/%00.js", b"404"),
        ("/page/" + "x" * 5000 + ".js", b"404"),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))  # clients make paths shorter
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.read(), 10)).split()[1] == status, path[:50]
        writer.close()


async def test_credential_is_forwarded_unparsed(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.get("/v1/models", headers={"authorization": "Bearer who-ever"})).status_code == 200
        for given in ("Basic eA==", "Bearer", "Bearer a b"):
            answer = await client.get("/v1/models", headers={"authorization": given})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert "send Authorization: Bearer CREDENTIAL (api_key in" in answer.json()["error"]["message"]


async def test_unknown_paths_and_methods_list_the_valid_ones(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/chat/completions", json={})  # base_url lacks /v1
        assert (answer.status_code, "use /v1/chat/completions" in answer.text) == (404, True)
        answer = await client.get("/v1/chat/completions")
        assert (answer.status_code, answer.json()["error"]["message"]) == (405, "GET is not allowed, only POST")


async def test_request_heads_are_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    host, _, port = url.removeprefix("http://").rpartition(":")
    for sent, reported in (
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 99_999, b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /", b""),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        assert reported in (await asyncio.wait_for(reader.read(), 10))[:20]
        writer.close()


async def test_connections_are_bounded(service: Served) -> None:
    """Two connections are accepted, even while a third is open. The third is refused in JSON, and accepted after
    another has closed."""
    async with opened(service.address, max_connections=2) as url, AsyncExitStack() as connections:
        host, _, port = url.removeprefix("http://").rpartition(":")

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            connections.callback(writer.close)
            return reader, writer

        async def is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, more: str = "") -> None:
            writer.write(f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
            async with asyncio.timeout(10):
                assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")

        two = [await connect() for _ in range(2)]
        for each in two:
            await is_answered(*each)
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            for asking in (client.get("/healthz"), client.post("/v1/completions", content=b"x" * 1_000_000)):
                answer = await asking
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "gateway_busy"
                reported = [answer.headers[name] for name in ("retry-after", "x-content-type-options", "connection")]
                assert reported == ["1", "nosniff", "close"]
        late = await connect()
        for each in two:
            await is_answered(*each)
        await is_answered(*two[0], more="Connection: close\r\n")
        assert await asyncio.wait_for(two[0][0].read(), 10) == b""
        await is_answered(*late)


async def test_new_certificate_is_served_without_a_restart(service: Served, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"

    def show() -> None:
        for path, content in zip((chain, key), authority.make(), strict=True):
            path.write_bytes(content)

    async def seen(url: str) -> bytes:
        context = ssl.create_default_context(cafile=str(authority.file))
        host, _, port = url.removeprefix("https://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    show()
    async with opened(service.address, tls_cert=str(chain), tls_key=str(key)) as url:
        before = await seen(url)
        show()
        await asyncio.sleep(3 * LOOK_SECONDS)
        assert await seen(url) != before


async def test_invalid_settings_are_refused(service: Served) -> None:
    for settings in ({"host": "0.0.0.0"}, {"tls_cert": "x"}, {"public_url": "example"}, {"port": 70_000}):
        with pytest.raises(InvalidArgument):
            GatewayConfig(**settings).check()  # type: ignore[arg-type]
    async with opened(service.address) as url:
        with pytest.raises(StartError, match="cannot listen"):
            listen("127.0.0.1", int(url.rpartition(":")[2]))


def test_responses_are_sent_without_delay() -> None:
    """Without TCP_NODELAY the parts of an answer wait for acknowledgements, up to 40 ms."""
    for host in ("127.0.0.1", "::1"):
        with listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2]):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_each_caller_is_identified_by_its_credential(tmp_path: Path) -> None:
    names = {name: new_credential() for name in ("acme", "other")}
    file = tmp_path / "credentials"
    entries = [CredentialEntry(tenant=name, role="user", digests=(digest_of(each),)) for name, each in names.items()]
    file.write_text("".join(f"{line_of(entry)}\n" for entry in entries))
    served = serving(FakeEngine(), tmp_path / "model", authenticator=Credentials.from_file(str(file)))
    async with served as (_, address), opened(address) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        acme, other = {"x-api-key": names["acme"]}, {"authorization": f"Bearer {names['other']}"}
        plain = {"content-type": "text/plain"}
        assert (await client.post("/v1/contexts/book", content=b"x", headers=plain)).status_code == 401
        assert (await client.post("/v1/contexts/book", content=b"x", headers=plain | acme)).status_code == 200
        assert (await client.get("/v1/contexts/book", headers=acme)).status_code == 200
        assert (await client.get("/v1/contexts/book", headers=other)).status_code == 404
        assert (await client.get("/v1/contexts")).status_code == 401
        assert (await client.get("/healthz")).status_code == (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/messages",
        "POST /v1/contexts/book/fork",
        "PATCH /v1/contexts/book",
        "POST /v1/contexts/book",
    ],
)
async def test_body_of_a_caller_without_a_credential_is_not_read(tmp_path: Path, request_line: str) -> None:
    """It would use memory of the shared body budget."""
    credential, file = new_credential(), tmp_path / "credentials"
    file.write_text(f"{line_of(CredentialEntry(tenant='acme', role='user', digests=(digest_of(credential),)))}\n")
    served = serving(FakeEngine(), tmp_path / "model", authenticator=Credentials.from_file(str(file)))
    async with served as (_, address), opened(address) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{{".encode())
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"401"
        writer.close()


async def test_callers_without_a_credential_cannot_learn_the_model_name(tmp_path: Path) -> None:
    credential, file = new_credential(), tmp_path / "credentials"
    file.write_text(f"{line_of(CredentialEntry(tenant='acme', role='user', digests=(digest_of(credential),)))}\n")
    served = serving(FakeEngine(), tmp_path / "model", authenticator=Credentials.from_file(str(file)))
    async with served as (_, address), opened(address) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:

        async def query(model: str, headers: dict[str, str]) -> tuple[int, str]:
            body = {"model": model, "messages": [{"role": "user", "content": "Who?"}]}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            return answer.status_code, answer.text

        known = {"authorization": f"Bearer {credential}"}
        assert (await query("other", known))[0] == 404  # the gateway has cached the name from here on
        assert (await query("other", {"x-api-key": credential}))[0] == 404
        for wrong in ({}, {"authorization": f"Bearer {new_credential()}"}, {"x-api-key": new_credential()}):
            assert (await query("fake", wrong))[0] == 401
            assert await query("other", wrong) == await query("fake", wrong)
