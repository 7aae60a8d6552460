"""Arbitrary client input never causes a 500, and the service answers afterwards."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway import app, callers
from gateway.bodies import BodyReader
from tests.support.gateways import opened, shared_service
from tests.support.service import FakeEngine, Served, ids, serving

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
BAD = (
    (b"", 400, None),
    (b"{", 400, None),
    (b"[]", 400, None),
    (b'{"model": NaN}', 400, None),
    (b'{"model": "fake", "model": "fake"}', 400, None),
    (b"[" * 10_000 + b"]" * 10_000, 400, None),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, None),
    (b'{"model": "\\ud800"}', 400, None),
    (b'{"model": "\xff"}', 400, None),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, None),
)
PART: dict[str, Any] = {"type": "text", "text": "x"}
WRONG = (
    ({"messages": []}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [PART | {"image_url": "x"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [PART, PART | {"x": 0}]}]}, "messages[0].content[1].x"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "1"}, "n"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}, "response_format.syntax"),
    ({"response_format": {"type": "grammar", "syntax": "regex", "definition": "("}}, "response_format.definition"),
    ({"audio": {}}, "audio"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1 << 31}, "top_k"),
    ({"top_k": 1 << 70}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 8.5}, "max_tokens"),
    ({"max_tokens": 1e300}, "max_tokens"),
    ({"max_tokens": 1 << 70}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 1 << 21}, "max_completion_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"seed": -(1 << 63) - 1}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"2147483648": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"priority": 1000}, "priority"),
    ({"priority": 1 << 40}, "priority"),
    ({"request_id": "no spaces"}, "request_id"),
    ({"user": "x" * 300}, "user"),
    ({"context": "NO"}, "context"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"what": 1}, "what"),
)


async def test_bodies_that_are_not_objects_are_refused(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for content, status, param in BAD:
            answer = await client.post(CHAT, content=content)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), content[:50]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=str)
async def test_invalid_field_is_named(url: str, change: dict[str, Any], param: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("change", [{"top_k": 1 << 31}, {"logit_bias": {str(1 << 31): 1}}], ids=str)
async def test_limit_of_an_id_is_named(url: str, change: dict[str, Any]) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD | change)
    assert "2,147,483,647" in answer.json()["error"]["message"]


async def test_empty_fields_of_parts_are_accepted(url: str) -> None:
    part = PART | {"annotations": [], "cache_control": None}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD | {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 200, answer.text


async def test_invalid_prompt_is_named(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for prompt in ([9_999_999], [1, 9_999_999], [], "", ["a", "b"]):
            answer = await client.post("/v1/completions", json={"model": "fake", "prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), prompt


async def test_fields_without_effect_are_accepted(url: str) -> None:
    empty = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": True, "n": None}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD | empty)
    assert (answer.status_code, answer.headers["longleaf-warning"]) == (200, "ignored: store")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_ignored_fields_are_named_in_a_header(url: str, is_streamed: bool) -> None:
    unasked = {"keep_alive": "5m", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD | unasked | {"stream": is_streamed, "prompt_cache_key": None})
        text = await client.post("/v1/completions", json={"model": "fake", "prompt": "x", "stream": is_streamed})
    assert answer.status_code == 200
    assert answer.headers["longleaf-warning"] == "ignored: keep_alive, metadata, parallel_tool_calls, service_tier"
    assert text.status_code == 200 and "longleaf-warning" not in text.headers


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"num_ctx": 4096}, "num_ctx"),
    ],
)
async def test_fields_that_change_answers_are_refused(url: str, given: dict[str, Any], param: str) -> None:
    same = {"length_penalty": 1.0, "skip_special_tokens": True, "guided_json": None, "min_tokens": 0}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.post(CHAT, json=GOOD | same)).status_code == 200
        answer = await client.post(CHAT, json=GOOD | given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_embeddings_are_refused_with_a_sentence(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/embeddings", json={"model": "fake", "input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_endpoint")
    assert answer.json()["error"]["message"].startswith("embeddings are not supported")


async def test_large_bodies_are_refused(url: str) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 65536

    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, content=b" " * (5 << 20))
        assert answer.status_code == 413
        assert (await client.post(CHAT, content=endless())).status_code == 413


@pytest.mark.parametrize(
    "values",
    [
        b"[]," * 1_500_000,
        b"{}," * 1_500_000,
        b'"",' * 1_500_000,
        b"1," * 2_000_000,
        (b"[" * 400 + b"]" * 400 + b",") * 5000,
        b'{"role":"user","content":"a"},' * 140_000,
        b'"\\\\","\\"",' * 400_000,
    ],
    ids=["arrays", "objects", "texts", "numbers", "nested", "messages", "escapes"],
)
async def test_bodies_with_too_many_values_are_refused(url: str, values: bytes) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path, field in ((CHAT, b"messages"), ("/v1/completions", b"prompt"), (CHAT, b"metadata")):
            answer = await client.post(path, content=b'{"model":"fake","%s":[%s1]}' % (field, values))
            assert answer.status_code == 413, answer.text


async def test_bodies_with_long_texts_and_many_numbers_are_accepted(service: Served, url: str) -> None:
    service.engine.max_positions = 1 << 23
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        text = json.dumps({"model": "fake", "prompt": '{"a": ["\\", 1, "b"]}, ' * 40_000, "max_tokens": 2})
        numbers = json.dumps({"model": "fake", "prompt": [1, 2] * 100_000, "max_tokens": 2})
        for content in (text, numbers):
            assert (await client.post("/v1/completions", content=content)).status_code == 200


@pytest.mark.parametrize("count", [513, 10_000])
async def test_more_messages_than_the_service_accepts_are_refused(url: str, count: int) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD | {"messages": GOOD["messages"] * count})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"] == f"messages: has {count:,} messages; allowed are 1 to 512"


async def test_stalled_service_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "ANSWER_SECONDS", 0.3)

    async def stand(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    over = asyncio.Event()
    silent = await asyncio.start_server(stand, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with opened(address) as url, httpx2.AsyncClient(base_url=url, timeout=10) as client:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/fake"),
            ("GET", "/v1/cluster"),
            ("GET", "/v1/cluster?once=true"),
            ("GET", "/v1/contexts"),
            ("GET", "/v1/contexts/book"),
            ("HEAD", "/v1/contexts/book?upload_id=u"),
            ("PATCH", "/v1/contexts/book"),
            ("DELETE", "/v1/contexts/book"),
            ("POST", "/v1/contexts/book/fork"),
        ):
            content = {"PATCH": b'{"pinned":true}', "POST": b'{"id":"half"}'}.get(method)
            assert (await client.request(method, path, content=content)).status_code == 504, path
    over.set()
    silent.close()


async def test_no_error_reveals_the_address_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's whole path may be too long
    async with opened("unix:hidden-name") as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path in ("/v1/models", "/v1/cluster", "/v1/contexts", "/readyz"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "the service" in answer.text and "hidden-name" not in answer.text and "unix:" not in answer.text
        response = await client.post("/v1/contexts/book", content=b"x", headers={"content-type": "text/plain"})
        assert "unix:" not in response.text


async def test_unreachable_service_is_reported(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path / "model") as (_, address):
        pass
    async with opened(address) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(CHAT, json=GOOD)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200


async def test_truncated_body_ends_quietly(service: Served, url: str) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    for path in (CHAT, "/v1/contexts/short?upload_id=u"):
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 99\r\n\r\n{{"
        writer.write(head.encode())
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await writer.wait_closed()
        del reader
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.head("/v1/contexts/short", params={"upload_id": "u"})
        assert (answer.headers["upload-offset"], answer.headers["upload-complete"]) == ("1", "?0")
        assert (await client.post(CHAT, json=GOOD)).status_code == 200


async def test_missing_body_times_out(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BodyReader", partial(BodyReader, part_seconds=0.2))
    async with opened(service.address) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        for length in ("Content-Length: 99", "Transfer-Encoding: chunked"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 10)  # until the connection ends
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'{"error":{"message":"the body was not received in time"' in answer
            writer.close()
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.post(CHAT, json=GOOD)).status_code == 200


async def test_bodies_beyond_the_memory_budget_are_refused_with_retry_after(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BodyReader", partial(BodyReader, 1000))
    async with opened(service.address) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 950\r\n"
        writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert b"100" in await asyncio.wait_for(reader.readline(), 10)  # the gateway waits for it
        answer = await client.post(CHAT, json=GOOD)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
        writer.close()
        while (await client.post(CHAT, json=GOOD)).status_code == 503:  # until the gateway has noticed
            pass
        assert (await client.post(CHAT, json=GOOD)).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "model messages max_tokens temperature top_p n stop seed logit_bias logprobs top_logprobs user stream context "
    "top_k min_p priority request_id prompt stream_options echo tools"
).split()
VALUES = st.sampled_from(
    [0, 1, -1, 0.5, 1e308, 1 << 63, "", "x", "fake", "fake:book", "book", True, False, None, [], {}]
)
"""Nearly valid values."""
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
        optional={
            "content": st.text(max_size=8)
            | st.lists(st.fixed_dictionaries({"type": VALUES, "text": VALUES}), max_size=2),
            "name": VALUES,
        },
    ),
    max_size=4,
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON | VALUES, max_size=4) | st.fixed_dictionaries(
    {"messages": MESSAGES}
)
OTHERS = st.dictionaries(
    st.sampled_from("id tokens display_name pinned expires ttl".split()), JSON | VALUES, max_size=3
)
PLACES: dict[str, tuple[str, st.SearchStrategy[dict[str, Any]]]] = {
    CHAT: ("POST", CHANGES),
    "/v1/completions": ("POST", CHANGES),
    "/v1/contexts/book/fork": ("POST", OTHERS),
    "/v1/contexts/book": ("PATCH", OTHERS),
}
EXAMPLES = (
    40,
    pytest.param(400, marks=pytest.mark.extended),
    pytest.param(8000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
)


@st.composite
def contents(draw: st.DrawFn, changes: st.SearchStrategy[dict[str, Any]]) -> bytes:
    """A body, or a truncated and overwritten one."""
    base = draw(st.sampled_from([{}, GOOD, GOOD | {"stream": True}, {"model": "fake", "prompt": "x", "max_tokens": 2}]))
    content = json.dumps(base | draw(changes), ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.sampled_from([False, False, False, True])):
        place = draw(st.integers(0, len(content)))
        content = content[:place] + draw(st.binary(max_size=3)) + content[place + draw(st.integers(0, 3)) :]
    return content


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_body_causes_a_500(path: str, examples: int, tmp_path: Path) -> None:
    """All examples share one gateway, which answers after each."""
    method, changes = PLACES[path]
    with shared_service(tmp_path / "model") as gateway:
        gateway.engine.answer, gateway.engine.contexts["book"] = (ids("x"),), list(ids("long"))

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(content=contents(changes))
        def bears(content: bytes) -> None:
            answer = gateway.run(gateway.client.request(method, path, content=content))
            assert answer.status_code < 500, (content, answer.text)
            assert '"code":"internal"' not in answer.text and "event: error" not in answer.text
            assert gateway.run(gateway.client.post(CHAT, json=GOOD)).status_code == 200

        bears()
