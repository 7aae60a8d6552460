"""Extraction of uploaded files: limits of all files together, clients that do not read, cancellation."""

import asyncio
import gc
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from typing import Any, BinaryIO

import pytest

from gateway.contexts import extraction
from gateway.contexts.extraction import extract_files
from gateway.contexts.received_files import ReceivedFile, ReceivedFiles
from gateway.contexts.upload_slots import UploadSlots
from longleaf.documents.collection import Collection
from longleaf.documents.extraction_process import ExtractedFile, FileSection
from longleaf.documents.limits import ExtractionLimits
from longleaf.errors import InvalidArgument, Unavailable
from tests.support import document_samples as samples
from tests.support.full_disk import full_file


async def received(contents: Mapping[str, bytes]) -> ReceivedFiles:
    files = ReceivedFiles()
    for name, data in contents.items():
        files.add(ReceivedFile(name, files.num_bytes, len(data)))
        await files.write(data)
    return files


async def extracted(contents: Mapping[str, bytes], slots: UploadSlots, caller: str = "a") -> Collection:
    found = Collection()
    with slots.slot(caller, f"address of {caller}") as slot:
        async for _ in extract_files(await received(contents), slot, as_text=False, found=found):
            pass
    return found


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ExtractionLimits(text_bytes=50), "body: has more than 50 bytes of text and names: upload fewer"),
        (ExtractionLimits(num_sections=2), "body: has more than 2 sections: upload fewer files at a time"),
    ],
)
async def test_limits_apply_to_all_files_together(limits: ExtractionLimits, message: str) -> None:
    await extracted({f"{i}.txt": b"a" * 15 for i in range(2)}, UploadSlots(limits))
    with pytest.raises(InvalidArgument, match=message):
        await extracted({f"{i}.txt": b"a" * 15 for i in range(3)}, UploadSlots(limits))


async def test_file_that_is_too_large_alone_is_left_out() -> None:
    files = {"a.txt": b"a" * 200, "b.txt": b"b" * 90}
    found = await extracted(files, UploadSlots(ExtractionLimits(text_bytes=100)))
    assert [each.name for each in found.files] == ["b.txt"]
    assert [each.reason for each in found.left_out] == ["has more than 100 bytes of text"]


async def test_disk_is_free_when_the_files_are_extracted() -> None:
    files = await received({"a.txt": b"text", "b.png": b"\x89PNG\r\n\x1a\n\0"})
    slots, found = UploadSlots(), Collection()
    with slots.slot("a", "a") as slot:
        async for _ in extract_files(files, slot, as_text=False, found=found):
            pass
        assert [each.name for each in found.files] == ["a.txt"]
        with pytest.raises(ValueError, match="closed file"), files.opened(next(iter(files))):
            pass


async def test_client_that_does_not_read_delays_no_other_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "REPORT_SECONDS", 0.0)
    slots = UploadSlots()
    with ExitStack() as stack:
        stalled = [
            extract_files(
                await received({f"{i}.txt": b"text"}),
                stack.enter_context(slots.slot("a", "a")),
                as_text=False,
                found=Collection(),
            )
            for i in range(4)
        ]
        for each in stalled:
            await anext(each)  # and no further one
        async with asyncio.timeout(60):
            found = await extracted({"b.txt": b"text"}, slots, "b")
        assert len(found.files) == 1
        for each in stalled:
            await each.aclose()
    slots.audit()


async def test_closing_ends_the_process_without_a_log_record(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    monkeypatch.setattr(extraction, "REPORT_SECONDS", 0.0)
    slots = UploadSlots()
    slow = samples.zipped({f"{i}.bin": bytes(1 << 20) for i in range(200)})
    for _ in range(3):
        files = await received({f"{i}.zip": slow for i in range(2)})
        with slots.slot("a", "a") as slot:
            async with aclosing(extract_files(files, slot, as_text=False, found=Collection())) as steps:
                await anext(steps)
    gc.collect()
    await asyncio.sleep(0)
    assert not reported
    slots.audit()


async def test_slow_files_of_one_caller_leave_a_process_to_others() -> None:
    slots = UploadSlots()
    slow = samples.zipped({f"{i}.bin": bytes(1 << 20) for i in range(100)})
    with ExitStack() as stack:
        stalled = [
            extract_files(
                await received({f"{i}.zip": slow for i in range(20)}),
                stack.enter_context(slots.slot("a", "a")),
                as_text=False,
                found=Collection(),
            )
            for _ in range(4)
        ]
        running = [asyncio.create_task(anext(each)) for each in stalled]
        await asyncio.wait(running)
        async with asyncio.timeout(60):
            for _ in range(3):
                assert len((await extracted({"b.txt": b"text"}, slots, "b")).files) == 1
        for each in stalled:
            await each.aclose()
    slots.audit()


async def test_extraction_of_an_upload_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "UPLOAD_SECONDS", 0.0)
    slots = UploadSlots()
    with pytest.raises(InvalidArgument, match="body: the extraction took more than 0 s: upload fewer files at a time"):
        await extracted({f"{i}.txt": b"text" for i in range(2)}, slots)
    slots.audit()


async def test_full_disk_at_the_copy_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, contents = UploadSlots(), {"a.txt": b"text", "b.txt": b"text"}
    files, found = await received(contents), Collection()
    monkeypatch.setattr(tempfile, "TemporaryFile", full_file)
    with slots.slot("a", "a") as slot, pytest.raises(Unavailable, match="cannot extract the files: try again later"):
        async for _ in extract_files(files, slot, as_text=False, found=found):
            pass
    slots.audit()


async def test_files_stay_open_until_a_thread_no_longer_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client leaves just when the time limit has cancelled the extraction."""
    began, is_free, seen = asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def slow(file: BinaryIO, *_: object, **__: object) -> ExtractedFile:
        loop.call_soon_threadsafe(began.set)
        assert is_free.wait(60)
        seen.append(file.fileno())  # raises ValueError if it is closed
        return ExtractedFile((FileSection("a.txt", "", "text"),), confined_by=("filter",))

    monkeypatch.setattr(extraction, "extract", slow)
    slots, files = UploadSlots(), await received({"a.txt": b"text"})
    with slots.slot("a", "a") as slot:
        running = extraction.UploadExtraction(files, slot.limits, Collection(), as_text=False)
        work = asyncio.create_task(extraction._run_in_turn(running, files, slot))
        await began.wait()
        for _ in range(2):
            work.cancel()
            await asyncio.sleep(0)
        assert not work.done()
        is_free.set()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert seen
