"""Bodies of uploads on disk: forms in any division, one descriptor, no memory."""

import asyncio
import os
import threading
import tracemalloc
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.contexts import received_files
from gateway.contexts.received_files import ReceivedFile, ReceivedFiles, content_type, receive_form
from gateway.errors import HttpProblem

HEADER = "multipart/form-data; boundary=edge"
END = b"--edge--\r\n"


def part(name: str, data: bytes, kind: str = "text/plain", field: str = "file") -> bytes:
    head = (
        f'--edge\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\nContent-Type: {kind}\r\n\r\n'
    )
    return head.encode() + data + b"\r\n"


FIELD = b'--edge\r\nContent-Disposition: form-data; name="note"\r\n\r\nnot a file\r\n'


async def parts_of(body: bytes, size: int) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def received(body: bytes, size: int = 1 << 16, header: str = HEADER) -> ReceivedFiles:
    files = ReceivedFiles()
    await receive_form(header, parts_of(body, size), files, asyncio.Lock())
    return files


def contents(files: ReceivedFiles) -> Generator[tuple[ReceivedFile, bytes]]:
    for each in files:
        with files.opened(each) as file:
            yield each, os.pread(file.fileno(), 1 << 20, 0)


@given(
    st.dictionaries(st.text("abcé.", min_size=1, max_size=8), st.binary(max_size=300), min_size=1, max_size=6),
    st.integers(1, 400),
)
async def test_form_in_any_division(given: Mapping[str, bytes], size: int) -> None:
    body = FIELD.join(part(name, data) for name, data in given.items()) + END
    with closing(await received(body, size)) as files:
        assert [(each.name, data) for each, data in contents(files)] == list(given.items())
        assert [files.head(each) for each in files] == list(given.values())


async def test_types_and_charsets_of_parts() -> None:
    body = part("a.txt", b"\xe9", "Text/Plain; Charset=ISO-8859-1") + part("b.pdf", b"x", "application/pdf") + END
    with closing(await received(body)) as files:
        assert [(each.declared, each.encoding) for each in files] == [
            ("text/plain", "iso8859-1"),
            ("application/pdf", ""),
        ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (part("a.txt", b"x"), "ends without its last boundary"),
        (b"", "ends without its last boundary"),
        (b"no boundary", "is not a valid form"),
        (FIELD * 17 + END, "more than 16 fields"),
        (part("a.txt", b"x") * 257 + END, "more than 256 files"),
        (b"--edge\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END, "has no name"),
        (part("a.txt", b"x", "text/plain; charset=none-such") + END, "charset: 'none-such' is not a known charset"),
        (b"--edge\r\n" + b"a: b\r\n" * 10_000 + b"\r\nx\r\n" + END, "is not a valid form"),
        (b"--edge\r\na: " + b"b" * 1_000_000 + b"\r\n\r\nx\r\n" + END, "is not a valid form"),
    ],
)
async def test_bad_forms_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(HttpProblem, match=message):
        await received(body)


@pytest.mark.parametrize("header", ["multipart/form-data", "multipart/form-data; boundary=" + "x" * 1000])
async def test_bad_boundaries_are_refused(header: str) -> None:
    with pytest.raises(HttpProblem, match="is not a valid form"):
        await received(END, header=header)


async def test_form_needs_one_descriptor_and_little_memory() -> None:
    """256 files of 500 kB, which is below any limit up to which a file might be kept in memory."""
    data = os.urandom(500_000)

    async def body() -> AsyncGenerator[bytes, None]:
        for i in range(256):
            content = part(f"{i}.bin", data)
            for start in range(0, len(content), 1 << 16):
                yield content[start : start + (1 << 16)]
        yield END

    with closing(ReceivedFiles()) as files:
        before = len(os.listdir("/proc/self/fd"))
        tracemalloc.start()
        try:
            await receive_form(HEADER, body(), files, asyncio.Lock())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(files) == 256
        assert len(os.listdir("/proc/self/fd")) == before
        assert peak < 4_000_000
        with files.opened(list(files)[200]) as file:
            assert file.read() == data


async def test_bytes_that_resemble_boundaries_do_not_delay_the_event_loop() -> None:
    """The parser holds the event loop for none of the parts, which take it about 10 ms each."""
    content, threads = part("a.txt", b"\r\n--edge-X" * 50_000) + END, set[int]()
    with closing(ReceivedFiles()) as files:
        parsed = received_files._FormParser.parsed

        def watched(parser: received_files._FormParser, data: bytes) -> bytes:
            threads.add(threading.get_ident())
            return parsed(parser, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(received_files._FormParser, "parsed", watched)
            await receive_form(HEADER, parts_of(content, 1 << 16), files, asyncio.Lock())
        assert threads
        assert threading.get_ident() not in threads
        assert [each.num_bytes for each in files] == [500_000]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", ("", "")),
        ("Text/HTML", ("text/html", "")),
        ('text/plain; Charset="UTF-8"; x=y', ("text/plain", "utf-8")),
        ("text/plain;charset", ("text/plain", "")),
        (";charset=a", ("", "a")),
    ],
)
def test_content_type(value: str, wanted: tuple[str, str]) -> None:
    assert content_type(value) == wanted
