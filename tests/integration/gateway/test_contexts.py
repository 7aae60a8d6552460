"""Contexts over HTTP: uploaded in pieces, described, updated, forked, deleted; and the cluster."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longleaf.client.proxy_client import ProxyClient
from longleaf.errors import NotFound
from longleaf.types import Drafting, IngestHeader
from tests.support.gateways import opened, shared_service
from tests.support.service import TEXT, Served, ids

PLAIN = {"content-type": "text/plain"}


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_document_becomes_a_context(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        parameters = {"display_name": "Moby", "pinned": "true"}
        answer = await client.post("/v1/contexts/book", params=parameters, content=TEXT.encode(), headers=PLAIN)
        events = events_of(answer)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [each["phase"] for each in events][:2] == ["receiving", "tokenizing"] and events[-1]["phase"] == "ready"
        context = (await client.get("/v1/contexts/book")).json()
        assert events[-1]["context"] == context and (context["id"], context["model"]) == ("book", "fake:book")
        assert (context["display_name"], context["pinned"], context["expires"]) == ("Moby", True, None)
        assert (await client.get("/v1/contexts")).json() == {"object": "list", "data": [context]}
        again = await client.post("/v1/contexts/book", content=b"x", headers=PLAIN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "already_exists")


async def test_all_upload_options_reach_the_engine(service: Served, url: str) -> None:
    parameters = {
        "append": "false",
        "upload_id": "u1",
        "display_name": "Moby",
        "pinned": "true",
        "ttl": "1000",
        "capacity": "4000",
        "system": "Be short.",
        "priority": "3",
    }
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/book", params=parameters, content=TEXT.encode(), headers=PLAIN)
    assert events_of(answer)[-1]["phase"] == "ready", answer.text
    given, (scheduling,) = service.engine.settings["book"], service.engine.schedulings
    assert (given.display_name, given.is_pinned, given.ttl, given.capacity) == ("Moby", True, 1000, 4000)
    assert (scheduling.priority, scheduling.client) == (3, "127.0.0.1")
    resident = service.engine.contexts["book"]
    beginning = resident.index(ids("Be short.")[0])
    assert tuple(resident[beginning:]) == (*ids("Be short."), *ids(TEXT))


async def test_contexts_are_changed_forked_and_deleted(service: Served, url: str) -> None:
    service.engine.contexts["book"] = list(ids("long"))
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        changed = await client.patch("/v1/contexts/book", json={"display_name": "B", "pinned": True})
        assert (changed.json()["display_name"], changed.json()["pinned"]) == ("B", True)
        made = await client.post("/v1/contexts/book/fork", json={"id": "half", "tokens": 2})
        assert (made.status_code, made.json()["tokens"]) == (201, 2)
        made = await client.post("/v1/contexts/book/fork", json={"id": "twig", "tokens": 3, "recompute": True})
        assert (made.status_code, made.json()["tokens"], made.json()["recomputed_tokens"]) == (201, 3, 0)
        wrong = await client.post("/v1/contexts/book/fork", json={"id": "NO"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "id")
        assert (await client.delete("/v1/contexts/half")).status_code == 204
        gone = await client.delete("/v1/contexts/half")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "context_not_found")


async def test_upload_resumes_at_its_offset(service: Served, url: str) -> None:
    content, path = TEXT.encode(), "/v1/contexts/book?upload_id=u"
    length = {**PLAIN, "Upload-Length": str(len(content))}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        first = await client.post(path, content=content[:5], headers=length)
        assert events_of(first)[-1] == {"phase": "incomplete", "received_bytes": 5}
        known = await client.head(path)
        assert (known.headers["upload-offset"], known.headers["upload-complete"]) == ("5", "?0")
        wrong = await client.post(path, content=content[4:], headers={**length, "Upload-Offset": "4"})
        assert (wrong.status_code, wrong.headers["upload-offset"]) == (409, "5")
        assert wrong.json()["error"]["code"] == "wrong_offset"
        rest = await client.post(path, content=content[5:], headers={**length, "Upload-Offset": "5"})
        assert events_of(rest)[-1]["phase"] == "ready"
        known = await client.head(path)
        assert known.headers["upload-complete"] == "?1"
        again = await client.post(path, headers={**length, "Upload-Offset": str(len(content))})
        assert events_of(again)[-1]["phase"] == "ready"


async def test_cancelled_append_keeps_its_context(service: Served, url: str) -> None:
    service.engine.contexts["book"] = [1]
    path = "/v1/contexts/book?upload_id=u"
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        headers = {**PLAIN, "Upload-Length": "100"}
        assert events_of(await client.post(f"{path}&append=true", content=b"some", headers=headers))[-1][
            "received_bytes"
        ]
        assert (await client.delete(path)).status_code == 204
        for wrong, status in ((path, 404), (f"{path}&append=true", 400), ("/v1/contexts/book?upload_id=", 400)):
            assert (await client.delete(wrong)).status_code == status
        assert (await client.head(f"{path}&append=true")).headers["upload-offset"] == "0"
        assert (await client.get("/v1/contexts/book")).json()["tokens"] == 1


async def test_querying_an_upload_does_not_start_one(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.head("/v1/contexts/new?upload_id=u1")
        assert (answer.status_code, answer.headers["upload-offset"], answer.headers["upload-complete"]) == (
            200,
            "0",
            "?0",
        )
    with pytest.raises(NotFound):
        await service.client.cancel_ingest("new", "u1")


async def test_two_uploads_with_one_name_create_one_context(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        both = [client.post(f"/v1/contexts/book?upload_id={u}", content=b"text", headers=PLAIN) for u in "ab"]
        ends = [
            events_of(answer)[-1] if answer.status_code == 200 else answer.json()
            for answer in await asyncio.gather(*both)
        ]
    assert sorted("context" in end for end in ends) == [False, True] and any("error" in end for end in ends)


async def test_invalid_documents_are_refused(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for headers, status in (({"content-type": "application/json"}, 415), ({"content-type": "multipart/form"}, 415)):
            assert (await client.post("/v1/contexts/x", content=b"{}", headers=headers)).status_code == status
        for charset, status in (
            ("klingon", 415),
            ("UTF-8", 400),
            ('"utf8"; x=y', 400),
            ("us-ascii", 400),
        ):
            headers = {"content-type": f"text/plain; charset={charset}"}
            answer = await client.post("/v1/contexts/x", content=b"ab\xfc", headers=headers)
            assert answer.status_code == status, charset
            assert status == 400 or "is not a known charset" in answer.json()["error"]["message"]
        for name, value in (("what", "1"), ("ttl", "nan"), ("ttl", "1e308"), ("capacity", "x"), ("pinned", "maybe")):
            answer = await client.post("/v1/contexts/x", params={name: value}, headers=PLAIN)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        for change in ({"ttl": 1e308}, {"expires": 1e308}, {"expires": -1e308}):
            answer = await client.patch("/v1/contexts/x", json=change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, *change)
            assert len(answer.text) < 300
        for content, reported in ((b"", "body: the document is empty"), (b"ab\xff", "body: is not UTF-8 at byte 2")):
            answer = await client.post("/v1/contexts/x", content=content, headers=PLAIN)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
            assert reported in answer.json()["error"]["message"]
        slices = {**PLAIN, "Upload-Length": "2"}
        await client.post("/v1/contexts/x?upload_id=u", content=b"a", headers=slices)
        late = await client.post("/v1/contexts/x?upload_id=u", content=b"\xff", headers=slices | {"Upload-Offset": "1"})
        assert (late.status_code, events_of(late)[-1]["error"]["param"]) == (200, "body")
        for path, body in (("/v1/contexts/NO", {"content": b"x"}), ("/v1/contexts/x/fork", {"json": {"id": "NO"}})):
            answer = await client.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id")
            assert "1 to 63 of a-z" in answer.json()["error"]["message"]


CUTS = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8)
EXAMPLES = (
    40,
    pytest.param(150, marks=pytest.mark.extended),
    pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_split_interruption_and_resume_gives_the_whole_document(examples: int, tmp_path: Path) -> None:
    """All examples share one gateway."""
    numbers = itertools.count()
    with shared_service(tmp_path / "model") as gateway:

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(text=st.text(min_size=1, max_size=40), cuts=CUTS, is_appended=st.booleans())
        def is_whole(text: str, cuts: list[tuple[int, bool]], is_appended: bool) -> None:
            number = next(numbers)
            whole, cut = f"whole{number}", f"cut{number}"
            gateway.run(uploaded(gateway.client, whole, cut, text.encode(), cuts, is_appended))
            assert gateway.engine.contexts.pop(cut) == gateway.engine.contexts.pop(whole)

        is_whole()


async def uploaded(
    client: httpx2.AsyncClient, whole: str, cut: str, content: bytes, cuts: list[tuple[int, bool]], is_appended: bool
) -> None:
    """Creates two contexts, one in one request, one in pieces."""
    for name in (whole, cut) if is_appended else ():
        await client.post(f"/v1/contexts/{name}", content=b"It begins. ", headers=PLAIN)
    more = "append=true" if is_appended else ""
    assert events_of(await client.post(f"/v1/contexts/{whole}?{more}", content=content, headers=PLAIN))[-1]["context"]
    path = f"/v1/contexts/{cut}?upload_id=u{cut}&{more}"
    for size, is_broken in [*cuts, (len(content), False)]:
        offset = int((await client.head(path)).headers["upload-offset"])
        part = content[offset : offset + size]
        headers = {**PLAIN, "Upload-Offset": str(offset), "Upload-Length": str(len(content))}
        if is_broken:
            await break_off(client, path, part, headers)
        else:
            answer = await client.post(path, content=part, headers=headers)
            is_all = offset + len(part) == len(content)
            assert events_of(answer)[-1]["phase"] == ("ready" if is_all else "incomplete"), answer.text


async def break_off(client: httpx2.AsyncClient, path: str, part: bytes, headers: dict[str, str]) -> None:
    """Sends a part of a slice and disconnects."""
    host, _, port = str(client.base_url).removeprefix("http://").strip("/").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(part) + 1}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + part)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_cluster_state_is_sent_initially_and_after_each_change(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        once = (await client.get("/v1/cluster", params={"once": "true"})).json()
        assert (once["model"]["name"], once["running"], once["workers"][0]["node"]) == ("fake", 3, "here")
        assert once["drafting"] is None
        async with client.stream("GET", "/v1/cluster") as stream:
            lines = aiter(stream.aiter_lines())
            assert json.loads((await anext(lines)).removeprefix("data: ")) == once
            service.engine.running = 4
            service.engine.drafting = Drafting(drafted_tokens=9, accepted_tokens=6, tokens_per_step=1.5)
            service.engine.changes.record()
            assert await anext(lines) == ""
            answer = json.loads((await anext(lines)).removeprefix("data: "))
            assert answer["running"] == 4
            assert answer["drafting"] == {"drafted_tokens": 9, "accepted_tokens": 6, "tokens_per_step": 1.5}


async def test_head_request_for_the_cluster_returns_the_headers_and_ends(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client, asyncio.timeout(10):
        for parameters, kind in (({}, "text/event-stream"), ({"once": "true"}, "application/json")):
            head = await client.head("/v1/cluster", params=parameters)
            assert (head.status_code, head.headers["content-type"].partition(";")[0]) == (200, kind)


async def test_open_watch_does_not_block_gateway_shutdown(service: Served) -> None:
    async with httpx2.AsyncClient() as client, asyncio.timeout(60), AsyncExitStack() as gateway:
        url = await gateway.enter_async_context(opened(service.address, drain_seconds=600))
        async with client.stream("GET", f"{url}/v1/cluster") as stream:
            lines = aiter(stream.aiter_lines())
            assert (await anext(lines)).startswith("data: ")
            await gateway.aclose()
            assert [line async for line in lines] == [""], "it ends normally and is not cut off"


class Ids:
    """A document of ids that is interrupted."""

    error = None

    def __init__(self, *parts: tuple[int, ...]) -> None:
        self._parts = parts

    def acknowledge(self, offset: int) -> None:
        """The event is acknowledged, so the engine does not send it again."""

    async def pieces_from(self, _: int) -> AsyncIterator[tuple[int, ...]]:
        for part in self._parts:
            yield part
        await asyncio.get_running_loop().create_future()


async def test_querying_an_upload_of_ids_leaves_it_unchanged(service: Served, url: str) -> None:
    """It was begun over gRPC; an offset in bytes does not apply to it."""
    service.engine.max_positions = service.engine.total_tokens = 1 << 23
    header = IngestHeader("book", upload_id="u")

    async def received(*parts: tuple[int, ...]) -> int:
        async with ProxyClient(service.address) as relay, aclosing(relay.ingest_once(header, Ids(*parts))) as steps:
            async for step in steps:
                if step.received_tokens or not parts:
                    return step.received_tokens
        raise AssertionError("the stream ended")

    before = await received(tuple(number % 100 for number in range(70_000)), (1, 2))
    assert before >= 65_536
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.head("/v1/contexts/book?upload_id=u")).headers["upload-offset"] == "0"
    assert await received() >= before
