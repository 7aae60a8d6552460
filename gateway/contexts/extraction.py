"""Extraction of uploaded files in separate processes."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress

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


class UploadExtraction:
    """The extraction of the files of one upload. A thread extracts one file after the other; all other methods are
    called on the event loop.
    """

    def __init__(self, files: ReceivedFiles, limits: ExtractionLimits, found: Collection, *, as_text: bool) -> None:
        self.section: FileSection | None = None
        """The latest section that was read."""
        self._files = files
        self._limits = limits
        self._found = found
        self._as_text = as_text
        self._budget = TextBudget(limits)
        self._lock = threading.Lock()
        """Protects the next two."""
        self._process: ExtractionProcess | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        """Adds the texts of the files to the collection. Raises InvalidArgument, and TimeoutError after UPLOAD_SECONDS.
        Cancellation ends the process.
        """
        async with asyncio.timeout(UPLOAD_SECONDS):
            for each in self._files:
                try:
                    await self._extract_in_thread(each)
                except InvalidArgument as error:
                    if len(self._files) == 1:
                        raise
                    if self._budget.is_exceeded:
                        raise InvalidArgument("body", f"{error.description}: upload fewer files at a time") from None
                    self._found.left_out.append(LeftOut(each.name, error.description))
        if not self._found.files:
            raise InvalidArgument("body", "has no file with text")

    async def _extract_in_thread(self, each: ReceivedFile) -> None:
        """Cancellation ends the process, and returns after the thread, which uses the file."""
        work = asyncio.create_task(asyncio.to_thread(self._extract, each))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            self._cancel()
            while not work.done():
                with suppress(asyncio.CancelledError):  # a second one, of a client that leaves at the time limit
                    await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # otherwise asyncio logs it
            raise
        work.result()

    def _cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.cancel()

    # --- in the thread ---

    def _extract(self, each: ReceivedFile) -> None:
        try:
            with self._files.opened(each) as file:
                extracted = extract(
                    file,
                    each.name,
                    limits=self._limits,
                    encoding=each.encoding,
                    as_text=self._as_text,
                    declared=each.declared,
                    budget=self._budget,
                    on_start=self._on_start,
                    on_section=self._on_section,
                )
        except OSError as error:
            log.error("a file cannot be copied or its extraction cannot be started: %s", error.strerror)
            raise Unavailable("the gateway cannot extract the files: try again later") from None
        if "filter" not in extracted.confined_by:
            log.warning(UNFILTERED)
        self._found.files += [SourceFile(file.name, sections=file.sections) for file in files_of(extracted)]
        self._found.left_out += extracted.left_out
        self._found.remarks += extracted.remarks

    def _on_start(self, process: ExtractionProcess) -> None:
        with self._lock:
            self._process = process
            if self._is_cancelled:
                process.cancel()

    def _on_section(self, section: FileSection) -> None:
        self.section = section


async def extract_files(
    files: ReceivedFiles, slot: UploadSlot, *, as_text: bool, found: Collection
) -> AsyncGenerator[FileSection | None, None]:
    """Waits for the turn of the slot, adds the texts of the files to `found`, and yields the latest section at
    intervals. Of several files, those that cannot be read are left out; a single one raises InvalidArgument. Raises
    HttpProblem if the upload is evicted. Closing the generator ends the process."""
    extraction = UploadExtraction(files, slot.limits, found, as_text=as_text)
    # a separate task, so that a client that does not read its events delays no other upload
    work = asyncio.create_task(_run_in_turn(extraction, files, slot))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=REPORT_SECONDS)
            yield extraction.section
        work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # otherwise asyncio logs it


async def _run_in_turn(extraction: UploadExtraction, files: ReceivedFiles, slot: UploadSlot) -> None:
    await slot.wait_turn()
    try:
        await extraction.run()
    except TimeoutError:
        message = f"the extraction took more than {human_number(UPLOAD_SECONDS)} s"
        message += ": upload fewer files at a time" if len(files) > 1 else ""
        raise InvalidArgument("body", message) from None
    finally:
        files.close()  # before the slot's bytes count as free
        slot.end_extraction()
