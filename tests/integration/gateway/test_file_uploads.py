"""Files over HTTP that are not plain text: their extraction, its limits, and refusals before it."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.callers import caller_of
from gateway.contexts import extraction, file_upload
from gateway.contexts.file_upload import FileEvents, FileOptions
from gateway.contexts.received_files import ReceivedFile, ReceivedFiles
from gateway.contexts.upload_slots import UploadSlots
from gateway.errors import HttpProblem
from gateway.server import client_for
from longleaf.documents.extraction_process import ExtractedFile, FileSection
from longleaf.service_settings import GatewayConfig
from longleaf.types import IngestHeader
from tests.support import document_samples as samples
from tests.support.full_disk import full_file
from tests.support.service import Served, byte_tokenizer

PDF = {"content-type": "application/pdf"}


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(service: Served, context: str) -> str:
    return byte_tokenizer().decode(service.engine.contexts[context])


async def test_pdf_becomes_a_context(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/a?filename=r.pdf", content=samples.pdf(["One", "Two"]), headers=PDF)
        events = events_of(answer)
        assert [each["phase"] for each in events][:2] == ["extracting", "extracting"]
        assert events[-1]["phase"] == "ready", answer.text
        assert {"files": 1, "left_out": [], "left_out_count": 0}.items() <= next(
            each for each in events if "files" in each
        ).items()
        assert text_of(service, "a").endswith("One\n\nTwo\n\n")
        again = await client.post("/v1/contexts/a", content=samples.pdf(["x"]), headers=PDF)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "already_exists")


async def test_files_of_a_form_become_one_context(service: Served, url: str) -> None:
    """Each begins with its name, those that cannot be read are left out, and charsets are those of the parts."""
    files = [
        ("file", ("notes/a.md", b"# A", "text/markdown")),
        ("file", ("notes/b.docx", samples.docx(["Badge"]), "application/octet-stream")),
        ("file", ("notes/c.txt", "Grüße".encode("latin-1"), "text/plain; charset=iso-8859-1")),
        ("file", ("notes/d.png", b"\x89PNG\r\n\x1a\n\0", "image/png")),
        ("other", (None, b"ignored")),
    ]
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/notes", files=files)
        assert events_of(answer)[-1]["phase"] == "ready", answer.text
        summary = next(each for each in events_of(answer) if "files" in each)
        assert summary["left_out"] == [{"file": "notes/d.png", "reason": "is a PNG image"}]
        assert text_of(service, "notes").endswith(
            "===== notes/a.md =====\n\n# A\n\n===== notes/b.docx =====\n\nBadge\n\n\n\n===== notes/c.txt =====\n\nGrüße"
        )
        answer = await client.post("/v1/contexts/bare?file_headers=false", files=files[:1])
        assert text_of(service, "bare").endswith("# A")
        assert "=====" not in text_of(service, "bare")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("Grüße".encode("latin-1"), "text/plain; charset=iso-8859-1"),
        ("Grüße".encode("utf-16"), "text/plain; charset=utf-16"),
        ("Grüße".encode("utf-16-le"), "text/plain; charset=utf-16le"),
        ("\ufeffGrüße".encode(), "text/plain"),
        ("\ufeffGrüße".encode(), "text/plain; charset=utf-8"),
    ],
)
async def test_declared_charset_is_honoured(service: Served, url: str, content: bytes, kind: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/a", content=content, headers={"content-type": kind})
        assert events_of(answer)[-1]["phase"] == "ready", answer.text
        assert text_of(service, "a").endswith("Grüße")
        assert "\ufeff" not in text_of(service, "a")


async def test_html_is_extracted_unless_it_is_plain_text(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for query, text in (("", "Hi\n\n"), ("?plain_text=true", "<p>Hi")):
            answer = await client.post(
                f"/v1/contexts/a{query}", content=b"<p>Hi", headers={"content-type": "text/html"}
            )
            assert events_of(answer)[-1]["phase"] == "ready", answer.text
            assert text_of(service, "a").endswith(text)
            await client.delete("/v1/contexts/a")


@pytest.mark.parametrize(
    ("kind", "content", "query", "status", "message"),
    [
        ("application/pdf", b"\x89PNG\r\n\x1a\n\0", "", 415, "document is a PNG image"),
        ("application/pdf", b"text", "", 415, "document is a text file, but was declared as a PDF"),
        ("application/pdf", b"", "", 400, "body: the document is empty"),
        ("text/plain", samples.pdf(["x"]) + b"\xff", "", 400, "body: is a PDF: send it as application/pdf"),
        ("text/plain; charset=klingon", b"x", "", 415, "charset: 'klingon' is not a known charset"),
        ("multipart/form-data", b"x", "", 400, "body: is not a valid form: Content-Type has no boundary"),
        ("multipart/form-data; boundary=b", b"--b--\r\n", "", 400, "body: the form has no file"),
        ("application/pdf", samples.pdf(["x"]), "?file_headers=x", 400, "file_headers: must be true or false"),
    ],
)
async def test_bad_files_are_refused_before_extraction(
    service: Served, url: str, kind: str, content: bytes, query: str, status: int, message: str
) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(f"/v1/contexts/a{query}", content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (status, message)
    assert not service.engine.contexts


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("application/pdf", lambda: samples.pdf([""]), "document: has 1 page and no text"),
        (
            "application/zip",
            lambda: samples.zipped({"a.png": b"\x89PNG\r\n\x1a\n\0"}),
            "document: has no members that can be read",
        ),
        pytest.param(
            "application/zip",
            lambda: samples.zipped({f"{i}.bin": b"\0" * (100 << 20) for i in range(11)}),
            "decompressed bytes",
            marks=pytest.mark.extended,
        ),
    ],
    ids=["no text", "no members", "too large"],
)
async def test_failed_extraction_is_an_error_event(
    service: Served, url: str, kind: str, content: Callable[[], bytes], message: str
) -> None:
    """The gateway serves further requests."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/a", content=content(), headers={"content-type": kind})
        assert answer.status_code == 200
        assert message in events_of(answer)[-1]["error"]["message"]
        assert (await client.get("/v1/contexts")).json()["data"] == []


async def test_upload_id_repeats_an_upload(service: Served, url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(2):
            answer = await client.post("/v1/contexts/a?upload_id=u1", content=samples.pdf(["One"]), headers=PDF)
            assert answer.status_code == 200, answer.text
            assert events_of(answer)[-1]["phase"] == "ready", answer.text
        headers = {**PDF, "upload-offset": "5", "upload-length": "100"}
        answer = await client.post("/v1/contexts/b?upload_id=u2", content=b"x", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Upload-Offset")


def request_of(**headers: str) -> Request:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": given, "client": ("192.0.2.1", 5)}
    return Request(scope, receive)


def test_caller_is_the_credential_in_any_spelling() -> None:
    callers = {caller_of(request_of(authorization=given)) for given in ("Bearer x", "bearer  x", "BEARER x ")}
    assert len(callers) == 1
    assert caller_of(request_of(authorization="Bearer y")) not in callers
    assert caller_of(request_of()) == "192.0.2.1"


async def test_whole_body_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_upload, "BODY_SECONDS", 0.0)
    with UploadSlots().slot("a", "a") as slot, pytest.raises(HttpProblem, match="within 0 s, and each part within"):
        async for _ in file_upload._limited(request_of(), slot):
            pass


async def test_number_of_files_of_a_form_is_limited(service: Served, url: str) -> None:
    files = [("file", (f"{i}.txt", b"x", "text/plain")) for i in range(257)]
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/a", files=files)
    assert answer.status_code == 400
    assert "has more than 256 files" in answer.json()["error"]["message"]
    assert not service.engine.contexts


async def test_disconnect_ends_the_extraction(service: Served, url: str) -> None:
    """A caller that leaves frees its slot: far more uploads than slots succeed one after another."""
    slow = samples.zipped({f"{i}.bin": bytes(1 << 20) for i in range(200)})
    for _ in range(6):
        async with (
            httpx2.AsyncClient(base_url=url, timeout=60) as client,
            client.stream(
                "POST", "/v1/contexts/a", content=slow, headers={"content-type": "application/zip"}
            ) as answer,
        ):
            async for _ in answer.aiter_lines():
                break
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        async with asyncio.timeout(60):
            while True:
                answer = await client.post("/v1/contexts/b", content=samples.pdf(["One"]), headers=PDF)
                if answer.status_code != 503:
                    break
    assert events_of(answer)[-1]["phase"] == "ready"


async def idle_body(url: str, credential: str, stack: AsyncExitStack) -> None:
    """Begins an upload of a PDF, whose body does not arrive. Returns when the gateway waits for it."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    stack.callback(writer.close)
    head = f"POST /v1/contexts/{credential} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {credential}\r\n"
    head += "content-type: application/pdf\r\ncontent-length: 1000\r\nexpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    assert b"100 Continue" in await reader.readline()


async def test_idle_bodies_delay_no_other_caller(service: Served, url: str) -> None:
    async with AsyncExitStack() as stack, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for i in range(32):
            await idle_body(url, f"credential-{i // 4}", stack)
        answer = await client.post("/v1/contexts/a", content=samples.pdf(["One"]), headers=PDF)
        assert answer.status_code == 200, answer.text
        assert events_of(answer)[-1]["phase"] == "ready"
        refused = await client.post(
            "/v1/contexts/b", content=b"x", headers={**PDF, "authorization": "Bearer credential-0"}
        )
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "gateway_busy"


async def test_client_that_does_not_read_its_events_frees_its_slot(service: Served) -> None:
    """The extraction and the ingest end, and the last event is kept."""
    released = asyncio.Event()
    files, content = ReceivedFiles(), samples.pdf(["One", "Two"])
    await files.write(content)
    files.add(ReceivedFile("a.pdf", 0, len(content)))
    with UploadSlots().slot("a", "a") as slot:
        resources = ExitStack()
        resources.callback(released.set)
        async with client_for(GatewayConfig(server=service.address)) as client:
            reporting = FileEvents(client, IngestHeader(context="a"), "m", FileOptions(), slot, resources)
            async with aclosing(reporting.events(files)) as events:
                await anext(events)
                async with asyncio.timeout(60):
                    await released.wait()
                left = [json.loads(content.removeprefix(b"data: ")) async for content in events]
    assert [each["phase"] for each in left][-1] == "ready"


@pytest.mark.parametrize("content", [b"%PDF-1.7", b"x" * 1000, b"x" * 2_000_000])
async def test_full_disk_is_503(service: Served, url: str, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "TemporaryFile", full_file)
            sent = (
                {"files": {"file": ("a.txt", content)}} if len(content) > 100 else {"content": content, "headers": PDF}
            )
            answer = await client.post("/v1/contexts/a", **sent)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable"), answer.text
        answer = await client.post("/v1/contexts/a", content=samples.pdf(["One"]), headers=PDF)
        assert events_of(answer)[-1]["phase"] == "ready"


async def test_extraction_without_a_filter_is_logged(
    service: Served, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unfiltered(*_: object, **__: object) -> ExtractedFile:
        return ExtractedFile((FileSection("a.pdf", "", "text"),), confined_by=("limits", "namespaces"))

    monkeypatch.setattr(extraction, "extract", unfiltered)
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/contexts/a", content=samples.pdf(["One"]), headers=PDF)
    assert events_of(answer)[-1]["phase"] == "ready"
    assert extraction.UNFILTERED in caplog.messages
