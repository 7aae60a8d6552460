"""Contexts over HTTP: uploaded in pieces, told, changed, forked, deleted; and the cluster."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.doors import opened
from tests.support.service import TEXT, FakeEngine, Served, ids, serving

PLAIN = {"content-type": "text/plain"}


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_document_becomes_a_context(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:
        parameters = {"display_name": "Moby", "pinned": "true"}
        answer = await client.post("/v1/contexts/book", params=parameters, content=TEXT.encode(), headers=PLAIN)
        told = events_of(answer)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [each["phase"] for each in told][:2] == ["receiving", "tokenizing"] and told[-1]["phase"] == "ready"
        context = (await client.get("/v1/contexts/book")).json()
        assert told[-1]["context"] == context and (context["id"], context["model"]) == ("book", "fake:book")
        assert (context["display_name"], context["pinned"], context["expires"]) == ("Moby", True, None)
        assert (await client.get("/v1/contexts")).json() == {"object": "list", "data": [context]}
        again = await client.post("/v1/contexts/book", content=b"x", headers=PLAIN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "already_exists")


async def test_contexts_are_changed_forked_and_deleted(service: Served, url: str) -> None:
    service.engine.contexts["book"] = list(ids("long"))
    async with httpx2.AsyncClient(base_url=url) as client:
        changed = await client.patch("/v1/contexts/book", json={"display_name": "B", "pinned": True})
        assert (changed.json()["display_name"], changed.json()["pinned"]) == ("B", True)
        made = await client.post("/v1/contexts/book/fork", json={"id": "half", "tokens": 2})
        assert (made.status_code, made.json()["tokens"]) == (201, 2)
        assert (await client.delete("/v1/contexts/half")).status_code == 204
        gone = await client.delete("/v1/contexts/half")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "context_not_found")


async def test_an_upload_is_resumed_where_it_was(service: Served, url: str) -> None:
    content, path = TEXT.encode(), "/v1/contexts/book?upload_id=u"
    length = {**PLAIN, "Upload-Length": str(len(content))}
    async with httpx2.AsyncClient(base_url=url) as client:
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


async def test_two_uploads_of_one_name_get_one_context(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:
        both = [client.post(f"/v1/contexts/book?upload_id={u}", content=b"text", headers=PLAIN) for u in "ab"]
        ends = [
            events_of(answer)[-1] if answer.status_code == 200 else answer.json()
            for answer in await asyncio.gather(*both)
        ]
    assert sorted("context" in end for end in ends) == [False, True] and any("error" in end for end in ends)


async def test_documents_that_are_none_are_refused(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:
        for headers, status in (({"content-type": "application/json"}, 415), ({"content-type": "multipart/form"}, 415)):
            assert (await client.post("/v1/contexts/x", content=b"{}", headers=headers)).status_code == status
        for name, value in (("what", "1"), ("ttl", "nan"), ("ttl", "1e308"), ("capacity", "x"), ("pinned", "maybe")):
            answer = await client.post("/v1/contexts/x", params={name: value}, headers=PLAIN)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        for change in ({"ttl": 1e308}, {"expires": 1e308}, {"expires": -1e308}):
            answer = await client.patch("/v1/contexts/x", json=change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, *change)
            assert len(answer.text) < 300
        for content, told in ((b"", "body: the document is empty"), (b"ab\xff", "body: is not UTF-8 at byte 2")):
            answer = await client.post("/v1/contexts/x", content=content, headers=PLAIN)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
            assert told in answer.json()["error"]["message"]
        slices = {**PLAIN, "Upload-Length": "2"}
        await client.post("/v1/contexts/x?upload_id=u", content=b"a", headers=slices)
        late = await client.post("/v1/contexts/x?upload_id=u", content=b"\xff", headers=slices | {"Upload-Offset": "1"})
        assert (late.status_code, events_of(late)[-1]["error"]["param"]) == (200, "body")
        for path, body in (("/v1/contexts/NO", {"content": b"x"}), ("/v1/contexts/x/fork", {"json": {"id": "NO"}})):
            answer = await client.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id")
            assert "1 to 63 of a-z" in answer.json()["error"]["message"]


CUTS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=6)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=30), cuts=CUTS)
def test_any_cut_break_and_resume_gives_the_whole(
    text: str, cuts: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = text.encode()

    async def run() -> None:
        engine = FakeEngine()
        folder = tmp_path_factory.mktemp("model")
        async with (
            serving(engine, folder) as (_, address),
            opened(address) as url,
            httpx2.AsyncClient(base_url=url) as client,
        ):
            await client.post("/v1/contexts/whole", content=content, headers=PLAIN)
            for size, is_broken in cuts:
                await send(client, size, is_broken)
            assert events_of(await send(client, len(content), is_broken=False))[-1]["phase"] == "ready"
        assert engine.contexts["cut"] == engine.contexts["whole"]

    async def send(client: httpx2.AsyncClient, size: int, is_broken: bool) -> Any:
        path = "/v1/contexts/cut?upload_id=u"
        known = await client.head(path)
        offset = int(known.headers["upload-offset"])
        part = content[offset : offset + size]
        headers = {**PLAIN, "Upload-Offset": str(offset), "Upload-Length": str(len(content))}
        if not is_broken:
            return await client.post(path, content=part, headers=headers)
        host, _, port = str(client.base_url).removeprefix("http://").strip("/").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(part) + 1}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + part)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        return None

    asyncio.run(run())


async def test_the_cluster_is_told_once_and_at_every_change(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:
        once = (await client.get("/v1/cluster", params={"once": "true"})).json()
        assert (once["model"]["name"], once["running"], once["workers"][0]["node"]) == ("fake", 3, "here")
        async with client.stream("GET", "/v1/cluster") as stream:
            lines = aiter(stream.aiter_lines())
            assert json.loads((await anext(lines)).removeprefix("data: ")) == once
            service.engine.running = 4
            service.engine.changes.note()
            assert await anext(lines) == ""
            assert json.loads((await anext(lines)).removeprefix("data: "))["running"] == 4
