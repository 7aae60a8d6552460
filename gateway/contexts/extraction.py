"""Extraction of uploaded files in separate processes, with limits on their number and size."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from gateway.errors import HttpProblem, unavailable
from longleaf.documents.collection import Collection, SourceFile, files_of
from longleaf.documents.extraction_process import ExtractionProcess, FileSection, LeftOut, extract
from longleaf.documents.limits import LIMITS, ExtractionLimits
from longleaf.documents.text_budget import TextBudget
from longleaf.errors import InvalidArgument, StartError

MAX_UPLOADS = 8
"""Uploads that are received or extracted, or whose text has not been sent to the service. Further ones get 503."""
MAX_UPLOADS_PER_CALLER = 4
MAX_UPLOADS_PER_ADDRESS = 6
"""Limit for one address with several credentials, which may be made up if the service requires none."""
MAX_SPOOLED_BYTES = 1 << 30
"""Limit of all files that have been received and not yet been extracted, on disk."""
NUM_PROCESSES = 2
REPORT_SECONDS = 0.5
"""Time between two reports of the progress."""


class ExtractionSlots:
    """Limits the uploads that are extracted, in total, for each caller, and for each address."""

    def __init__(self, limits: ExtractionLimits = LIMITS) -> None:
        self.limits = limits
        self.processes = asyncio.Semaphore(NUM_PROCESSES)
        self._callers, self._addresses = Counter[str](), Counter[str]()
        self._num_bytes = 0

    @contextmanager
    def slot(self, caller: str, address: str) -> Generator["UploadSlot", None, None]:
        """A slot for one upload of a caller at an address. Raises HttpProblem if none is free."""
        if (
            self._callers.total() >= MAX_UPLOADS
            or self._callers[caller] >= MAX_UPLOADS_PER_CALLER
            or self._addresses[address] >= MAX_UPLOADS_PER_ADDRESS
        ):
            raise unavailable("the gateway is extracting as many documents as it can: try again later")
        self._callers[caller] += 1
        self._addresses[address] += 1
        slot = UploadSlot(self, caller, address)
        try:
            yield slot
        finally:
            slot.release()

    def add_bytes(self, num_bytes: int) -> None:
        """Counts spooled bytes. Raises HttpProblem beyond the limit."""
        if self._num_bytes + num_bytes > MAX_SPOOLED_BYTES:
            raise unavailable("the gateway is receiving as many documents as it can: try again later")
        self._num_bytes += num_bytes

    def remove(self, caller: str, address: str, num_bytes: int) -> None:
        """Frees a slot with its spooled bytes."""
        self._num_bytes -= num_bytes
        self._callers[caller] -= 1
        self._addresses[address] -= 1
        self._callers += Counter()  # drops callers without uploads
        self._addresses += Counter()

    def audit(self) -> None:
        """Checks that nothing is counted while no upload is open."""
        assert not self._callers
        assert not self._addresses
        assert self._num_bytes == 0, f"{self._num_bytes} bytes are still counted"


class UploadSlot:
    """The share of one upload."""

    def __init__(self, slots: ExtractionSlots, caller: str, address: str) -> None:
        self.slots, self._caller, self._address = slots, caller, address
        self._num_bytes, self._is_released = 0, False

    def grow(self, num_bytes: int) -> None:
        """Counts further bytes of the body. Raises HttpProblem."""
        limit = self.slots.limits.file_bytes
        if self._num_bytes + num_bytes > limit:
            raise HttpProblem(413, f"the body has more than {limit:,} bytes")
        self.slots.add_bytes(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Frees the slot. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self.slots.remove(self._caller, self._address, self._num_bytes)


@dataclass(frozen=True)
class UploadedFile:
    """A received file."""

    name: str
    file: BinaryIO
    declared: str = ""
    """Media type, in lower case and without parameters."""
    encoding: str = ""


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
    files: Sequence[UploadedFile], slots: ExtractionSlots, *, as_text: bool, found: Collection
) -> AsyncGenerator[FileSection | None, None]:
    """Adds the texts of the files to `found`, and yields the latest section at intervals. Of several files, those that
    cannot be read are left out; a single one raises InvalidArgument. Closing the generator ends the process."""
    run = _Run()
    # a separate task, so that a client that does not read its events delays no other upload
    work = asyncio.create_task(_extract_all(files, slots, as_text, run, found))
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


async def _extract_all(
    files: Sequence[UploadedFile], slots: ExtractionSlots, as_text: bool, run: _Run, found: Collection
) -> None:
    budget = TextBudget(slots.limits)
    for each in files:
        try:
            async with slots.processes:
                await _extract_in_thread(each, slots.limits, as_text, run, budget, found)
        except InvalidArgument as error:
            if len(files) == 1:
                raise
            if budget.is_exceeded:
                raise InvalidArgument("body", f"{error.description}: upload fewer files at a time") from None
            found.left_out.append(LeftOut(each.name, error.description))
    if not found.files:
        raise InvalidArgument("body", "has no file with text")


async def _extract_in_thread(
    each: UploadedFile, limits: ExtractionLimits, as_text: bool, run: _Run, budget: TextBudget, found: Collection
) -> None:
    """Cancellation ends the process, and returns after the thread, which uses the file."""
    work = asyncio.create_task(asyncio.to_thread(_extract, each, limits, as_text, run, budget, found))
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        run.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # otherwise asyncio logs it
        raise
    work.result()


def _extract(
    each: UploadedFile, limits: ExtractionLimits, as_text: bool, run: _Run, budget: TextBudget, found: Collection
) -> None:
    try:
        each.file.seek(0)
        extracted = extract(
            each.file,
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
        raise StartError(f"a file cannot be extracted: {error.strerror}") from None
    finally:
        each.file.close()  # early, because a form has many
    found.files += [SourceFile(file.name, sections=file.sections) for file in files_of(extracted)]
    found.left_out += extracted.left_out
    found.remarks += extracted.remarks
