"""Extraction of uploaded files in separate processes."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.contexts.received_files import ReceivedFile, ReceivedFiles
from gateway.contexts.upload_slots import UploadSlot
from longleaf.documents.collection import Collection, SourceFile, files_of
from longleaf.documents.extraction_process import ExtractionProcess, FileSection, LeftOut, extract
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.text_budget import TextBudget
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.formatting import human_number

UPLOAD_SECONDS = 300.0
"""Timeout for the extraction of all files of an upload."""
REPORT_SECONDS = 0.5
"""Time between two reports of the progress."""


UNFILTERED = (
    "files are extracted without a filter of system calls, which this machine does not support: a hostile file may "
    "reach the files and the network of the gateway"
)
log = logging.getLogger("gateway")


@dataclass
class _Run:
    """State that the thread of an extraction and the event loop share."""

    process: ExtractionProcess | None = None
    is_cancelled: bool = False
    section: FileSection | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, process: ExtractionProcess) -> None:
        with self.lock:
            self.process = process
            if self.is_cancelled:
                process.cancel()

    def cancel(self) -> None:
        with self.lock:
            self.is_cancelled = True
            if self.process is not None:
                self.process.cancel()

    def report(self, section: FileSection) -> None:
        self.section = section


async def extract_files(
    files: ReceivedFiles, slot: UploadSlot, *, as_text: bool, found: Collection
) -> AsyncGenerator[FileSection | None, None]:
    """Waits for the turn of the slot, adds the texts of the files to `found`, and yields the latest section at
    intervals. Of several files, those that cannot be read are left out; a single one raises InvalidArgument. Raises
    HttpProblem if the upload is evicted. Closing the generator ends the process."""
    run = _Run()
    # a separate task, so that a client that does not read its events delays no other upload
    work = asyncio.create_task(_extract_in_turn(files, slot, as_text, run, found))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=REPORT_SECONDS)
            yield run.section
        work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # otherwise asyncio logs it


async def _extract_in_turn(files: ReceivedFiles, slot: UploadSlot, as_text: bool, run: _Run, found: Collection) -> None:
    await slot.wait_turn()
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            await _extract_all(files, slot.limits, as_text, run, found)
    except TimeoutError:
        message = f"the extraction took more than {human_number(UPLOAD_SECONDS)} s"
        message += ": upload fewer files at a time" if len(files) > 1 else ""
        raise InvalidArgument("body", message) from None
    finally:
        files.close()  # before the slot's bytes count as free
        slot.end_extraction()


async def _extract_all(
    files: ReceivedFiles, limits: ExtractionLimits, as_text: bool, run: _Run, found: Collection
) -> None:
    budget = TextBudget(limits)
    for each in files:
        try:
            await _extract_in_thread(files, each, limits, as_text, run, budget, found)
        except InvalidArgument as error:
            if len(files) == 1:
                raise
            if budget.is_exceeded:
                raise InvalidArgument("body", f"{error.description}: upload fewer files at a time") from None
            found.left_out.append(LeftOut(each.name, error.description))
    if not found.files:
        raise InvalidArgument("body", "has no file with text")


async def _extract_in_thread(
    files: ReceivedFiles,
    each: ReceivedFile,
    limits: ExtractionLimits,
    as_text: bool,
    run: _Run,
    budget: TextBudget,
    found: Collection,
) -> None:
    """Cancellation ends the process, and returns after the thread, which uses the file."""
    work = asyncio.create_task(asyncio.to_thread(_extract, files, each, limits, as_text, run, budget, found))
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        run.cancel()
        while not work.done():
            with suppress(asyncio.CancelledError):  # a second one, of a client that leaves at the time limit
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # otherwise asyncio logs it
        raise
    work.result()


def _extract(
    files: ReceivedFiles,
    each: ReceivedFile,
    limits: ExtractionLimits,
    as_text: bool,
    run: _Run,
    budget: TextBudget,
    found: Collection,
) -> None:
    try:
        with files.opened(each) as file:
            extracted = extract(
                file,
                each.name,
                limits=limits,
                encoding=each.encoding,
                as_text=as_text,
                declared=each.declared,
                budget=budget,
                on_start=run.start,
                on_section=run.report,
            )
    except OSError as error:
        log.error("a file cannot be copied or its extraction cannot be started: %s", error.strerror)
        raise Unavailable("the gateway cannot extract the files: try again later") from None
    if "filter" not in extracted.confined_by:
        log.warning(UNFILTERED)
    found.files += [SourceFile(file.name, sections=file.sections) for file in files_of(extracted)]
    found.left_out += extracted.left_out
    found.remarks += extracted.remarks
