"""Limits of uploads whose files are extracted: open uploads, spooled bytes, processes, and texts in memory.

If there are too many, an upload of the address and then the caller with most of them is evicted. One caller's uploads
delay those of another caller by at most one extraction.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Literal

from gateway.errors import HttpProblem, busy
from longleaf.documents.limits import LIMITS, ExtractionLimits

MAX_UPLOADS = 256
"""Open uploads, with one open file each."""
MAX_UPLOADS_PER_CALLER = 4
MAX_SPOOLED_BYTES = 1 << 30
"""Files that have been received and not yet been extracted, on disk; a file of a form is copied for its extraction."""
NUM_PROCESSES = 2
"""Extractions at the same time, one of them for each caller."""
MAX_TEXTS = 8
"""Texts in memory: those that are being extracted, and those that have not been sent to the service."""
MAX_TEXTS_PER_CALLER = 2
MAX_TEXTS_PER_ADDRESS = 6
"""Limit for one address with several credentials, which may be made up if the service requires none."""
Stage = Literal["receiving", "waiting", "extracting", "extracted"]
FULL = "it is receiving as many documents as it can"


class UploadSlots:
    """All open uploads."""

    def __init__(self, limits: ExtractionLimits = LIMITS) -> None:
        self.limits = limits
        self.parsing = asyncio.Lock()
        """Held while a part of a form is parsed."""
        self._open = dict["UploadSlot", None]()
        """In the order of their start."""

    @contextmanager
    def slot(self, caller: str, address: str) -> Generator["UploadSlot", None, None]:
        """A slot for one upload of a caller at an address. Raises HttpProblem if none is free."""
        slot = UploadSlot(self, caller, address)
        if sum(each.caller == caller for each in self._open) >= MAX_UPLOADS_PER_CALLER:
            raise busy(f"{MAX_UPLOADS_PER_CALLER} uploads of files are running for this caller, which is the limit")
        self._make_room(slot, 1, MAX_UPLOADS, lambda _: 1)
        self._open[slot] = None
        try:
            yield slot
        finally:
            slot.release()

    def check_bytes(self, slot: "UploadSlot", num_bytes: int) -> None:
        """Makes room for further bytes of an upload. Raises HttpProblem if there is none."""
        self._make_room(slot, num_bytes, MAX_SPOOLED_BYTES, lambda each: each.num_bytes)

    def remove(self, slot: "UploadSlot") -> None:
        self._open.pop(slot, None)
        self.start_waiting()

    def start_waiting(self) -> None:
        """Starts the extraction of waiting uploads, as far as the limits allow. The address and then the caller with
        the fewest texts are first."""
        while True:
            texts = [each for each in self._open if each.stage in ("extracting", "extracted")]
            if len(texts) >= MAX_TEXTS or sum(each.stage == "extracting" for each in texts) >= NUM_PROCESSES:
                return
            waiting = [each for each in self._open if each.stage == "waiting" and _may_start(each, texts)]
            if not waiting:
                return
            min(waiting, key=lambda each: _counts(each, texts)).start()

    def audit(self) -> None:
        """Checks that nothing is counted while no upload is open."""
        assert not self._open

    def _make_room(self, slot: "UploadSlot", more: int, limit: int, size: Callable[["UploadSlot"], int]) -> None:
        """Ends uploads of others until `more` fits into the limit of the sum of all sizes. Raises HttpProblem if the
        slot's address or caller has most of them."""

        def of_address(slot: UploadSlot) -> int:
            return sum(size(each) for each in self._open if each.address == slot.address)

        def of_caller(slot: UploadSlot) -> int:
            return sum(size(each) for each in self._open if each.caller == slot.caller)

        while sum(map(size, self._open)) + more > limit:
            others = [each for each in self._open if each is not slot and each.stage in ("receiving", "waiting")]
            largest = max(others, key=lambda each: (of_address(each), of_caller(each), size(each)), default=None)
            if largest is None:
                raise busy(FULL)
            total = of_caller if largest.address == slot.address else of_address
            if total(largest) <= total(slot) + more:
                raise busy(FULL)
            self._open.pop(largest)
            largest.evict()


class UploadSlot:
    """One upload."""

    def __init__(self, slots: UploadSlots, caller: str, address: str) -> None:
        self._slots, self.caller, self.address = slots, caller, address
        self.limits = slots.limits
        self.stage: Stage = "receiving"
        self.num_bytes = 0
        """Spooled bytes."""
        self._is_evicted = False
        self._timeout: asyncio.Timeout | None = None
        """That of the current wait, which an eviction ends."""
        self._turn = asyncio.Event()

    def grow(self, num_bytes: int) -> None:
        """Counts further bytes of the body. Raises HttpProblem."""
        limit = self.limits.file_bytes
        if self.num_bytes + num_bytes > limit:
            raise HttpProblem(413, f"the body has more than {limit:,} bytes")
        if self._is_evicted:
            raise busy(FULL)
        self._slots.check_bytes(self, num_bytes)
        self.num_bytes += num_bytes

    @contextmanager
    def waiting_until(self, end: float | None) -> Generator[asyncio.Timeout, None, None]:
        """The timeout for a wait, to be entered. Raises HttpProblem, not TimeoutError, if the upload is evicted."""
        if self._is_evicted:
            raise busy(FULL)
        self._timeout = asyncio.timeout_at(end)
        try:
            yield self._timeout
        except TimeoutError:
            if self._is_evicted:
                raise busy(FULL) from None
            raise
        finally:
            self._timeout = None

    async def wait_turn(self) -> None:
        """Returns when the upload may be extracted; `end_extraction` must follow. Raises HttpProblem if the upload
        is evicted."""
        self.stage = "waiting"
        self._slots.start_waiting()
        with self.waiting_until(None) as timeout:
            async with timeout:
                await self._turn.wait()

    def start(self) -> None:
        """Ends the wait for the turn."""
        self.stage = "extracting"
        self._turn.set()

    def end_extraction(self) -> None:
        """Frees the process and the spooled bytes; the text still counts."""
        self.stage, self.num_bytes = "extracted", 0
        self._slots.start_waiting()

    def evict(self) -> None:
        """Ends the upload with 503."""
        self._is_evicted = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Frees the slot. Idempotent."""
        self._slots.remove(self)


def _counts(slot: UploadSlot, uploads: Iterable[UploadSlot]) -> tuple[int, int]:
    """Two numbers of uploads: those from the slot's address, and those by its caller."""
    uploads = list(uploads)
    return sum(each.address == slot.address for each in uploads), sum(each.caller == slot.caller for each in uploads)


def _may_start(slot: UploadSlot, texts: Iterable[UploadSlot]) -> bool:
    num_of_address, num_of_caller = _counts(slot, texts)
    is_extracting = any(each.caller == slot.caller and each.stage == "extracting" for each in texts)
    return not is_extracting and num_of_caller < MAX_TEXTS_PER_CALLER and num_of_address < MAX_TEXTS_PER_ADDRESS
