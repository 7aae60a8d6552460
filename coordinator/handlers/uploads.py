"""Ingests that survive a broken stream."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from coordinator.change_feed import ChangeCounter
from coordinator.handlers.document_tokenizer import DocumentTokenizer, IncompleteDocument
from coordinator.handlers.durable_uploads import DurableUploads, check_same
from coordinator.handlers.fair_share import eviction_victim, shares_of
from coordinator.handlers.resumable_generations import CallLater, call_later
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import Cancelled, DeadlineExceeded, LongleafError, ResourceExhausted, Unavailable
from longleaf.types import Account, IngestHeader, IngestProgress

if TYPE_CHECKING:
    from coordinator.engine.stream import Stream

KEEP_SECONDS = 600.0
"""Seconds for which an ingest without a stream is kept."""
TRIM_SECONDS = 30.0
"""Seconds between two searches for expired uploads."""
MAX_UPLOADS = 256
MAX_BYTES = 1 << 30
"""Bytes of memory of all documents that have not been passed to the engine: about 256 million tokens."""
RETRY_SECONDS = 5.0


class PrefillTask:
    """The prefill of an ingest, as a separate task: it runs even when no stream follows it."""

    def __init__(self, stream: "Stream", reports: AsyncGenerator[IngestProgress, None]) -> None:
        """`reports` are derived from the events of `stream`."""
        self._stream = stream
        self._reports = reports
        self.latest: IngestProgress | None = None
        self._error: Exception | None = None
        self._changes = ChangeCounter()
        self._task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def _run(self) -> None:
        try:
            async with aclosing(self._reports) as reports:
                async for self.latest in reports:
                    self._changes.record()
        except Exception as error:
            self._error = error
        finally:
            self._changes.record()

    async def progress(self) -> AsyncIterator[IngestProgress]:
        """Yields reports from now on; a slow reader gets only the latest ones. Raises the error that ended the
        prefill."""
        last_report = None
        while True:
            count, is_over = self._changes.count, self.is_over
            if self.latest is not None and self.latest is not last_report:
                last_report = self.latest
                yield last_report
            elif self._error is not None:
                raise self._error
            elif is_over:
                return
            else:
                await self._changes.after(count)

    async def stop(self) -> None:
        """Cancels the prefill in any state."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stream.aclose()


class Upload:
    """An ingest: its document while that arrives, then its prefill. The latest stream owns it."""

    def __init__(
        self, header: IngestHeader, document: DocumentTokenizer, threads: TokenizerPool, deadline: float | None = None
    ) -> None:
        self.header = header
        self._threads = threads
        self.deadline = deadline
        """When the client stops waiting, in seconds on the engine's clock."""
        self.document: DocumentTokenizer | None = document
        """None once its ids are with the engine."""
        self.prefill: PrefillTask | None = None
        self.owner: UploadLease | None = None
        """The stream that sends it; None while there is none."""
        self.num_counted = 0
        """Bytes of this upload included in the total."""
        self.idle_since: float | None = None
        """When the last stream disconnected; None while a stream is open."""
        self.is_cancelled = False
        """Ended by a cancel call."""
        self._work: Future[None] | None = None
        self._num_taken = document.num_tokens

    def pop_num_new_tokens(self) -> int:
        """Tokens received since the last call, including those from work that an earlier owner started."""
        num_tokens = self.document.num_tokens if self.document is not None else self._num_taken
        num_new, self._num_taken = num_tokens - self._num_taken, num_tokens
        return num_new

    @property
    def num_buffered_bytes(self) -> int:
        return self.document.num_buffered_bytes if self.document is not None else 0

    @property
    def is_prefilling(self) -> bool:
        return self.prefill is not None and not self.prefill.is_over

    def cancel(self) -> None:
        """End the upload for its current and later owners."""
        self.is_cancelled = True

    def begin(self, prefill: PrefillTask) -> None:
        """The engine has taken over the document."""
        self.document, self.prefill = None, prefill

    def acquire(self) -> "UploadLease":
        """Makes a new stream the owner; the previous one loses the upload."""
        self.owner, self.idle_since = UploadLease(self), None
        return self.owner

    async def run_on_document(self, function: Callable[..., None], *arguments: object) -> None:
        """Runs a short method of the document in a thread. If the caller is cancelled, the method either completes or
        does not start, so the document stays consistent."""
        self._work = self._threads.submit(function, *arguments)
        await asyncio.wrap_future(self._work)

    async def wait_idle(self) -> None:
        """Waits for work that an earlier owner started. Raises its error."""
        if self._work is not None:
            work = asyncio.wrap_future(self._work)
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()


class UploadLease:
    """A stream's ownership of an upload; it ends when another stream takes over."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload

    @property
    def is_current(self) -> bool:
        return self.upload.owner is self

    def check(self) -> None:
        """Raises Unavailable if another stream took over, and Cancelled if a call cancelled the upload."""
        if self.upload.is_cancelled:
            raise Cancelled(f"the ingest into contexts/{self.upload.header.context} was cancelled")
        if not self.is_current:
            raise Unavailable("another stream continued this upload")

    async def work(self, function: Callable[..., None], *arguments: object) -> None:
        """Like `Upload.run_on_document`. Raises Unavailable if another stream has taken over before or during the call,
        and Cancelled if a call cancelled the upload."""
        self.check()
        await self.upload.run_on_document(function, *arguments)
        self.check()


class Uploads:
    """All ingests, by context and upload id: those with an open stream, and those that can be resumed. `clock` counts
    seconds; `later` calls a function after a number of seconds.

    An upload without a stream is kept for `keep_seconds`. There are at most `max_uploads`, which hold at most
    `max_bytes` together; each client and each tenant is limited to its share. When a limit is reached, the oldest idle
    upload of the tenant that holds most is dropped. A running prefill is never dropped; the engine limits those.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        later: CallLater = call_later,
        *,
        keep_seconds: float = KEEP_SECONDS,
        max_uploads: int = MAX_UPLOADS,
        max_bytes: int = MAX_BYTES,
        tenant_share: float = 1.0,
        durable: DurableUploads | None = None,
    ) -> None:
        """`durable` persists uploads that can be resumed, if given."""
        self._tenant_share = tenant_share
        self.durable = durable
        self.clock = clock
        self._later = later
        self._timer: asyncio.TimerHandle | None = None
        self._keep_seconds, self._max_uploads, self._max_bytes = keep_seconds, max_uploads, max_bytes
        self._all: set[Upload] = set()
        self._by_key: dict[tuple[str, str], Upload] = {}
        self._num_bytes = Counter[Account]()
        """Bytes held by the uploads of each client."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of memory that all uploads hold."""
        return self._num_bytes.total()

    def num_of(self, tenant: str) -> int:
        """Uploads of a tenant that are open or can be resumed, including those of an earlier service."""
        self._trim()
        return sum(upload.header.tenant == tenant for upload in self._all) + self.num_retained_of(tenant)

    def num_retained_of(self, tenant: str) -> int:
        """Uploads of a tenant that exist only on disk: those of an earlier service, and those dropped from memory."""
        return len(self._retained_tokens(tenant))

    def num_tokens_of(self, tenant: str) -> int:
        """Tokens of a tenant's uploads whose documents have not been passed to the engine."""
        own = (upload.document for upload in self._all if upload.header.tenant == tenant)
        arrived = (document.num_tokens for document in own if document is not None)
        return sum(arrived) + sum(self._retained_tokens(tenant))

    def _retained_tokens(self, tenant: str) -> list[int]:
        """Token count of each upload of a tenant that exists only on disk."""
        return self.durable.tokens_of(tenant, self._by_key) if self.durable is not None else []

    def find(self, header: IngestHeader) -> Upload | None:
        """The ingest that `header` resumes. Raises InvalidArgument if its settings differ from the original ones."""
        upload = self.by_key(header)
        if upload is not None:
            check_same(upload.header, header)
        return upload

    def by_key(self, header: IngestHeader) -> Upload | None:
        """The ingest of that context and upload id, with any settings."""
        self._trim()
        return self._by_key.get(_key(header))

    def add(self, upload: Upload) -> None:
        """Raises ResourceExhausted when there are too many."""
        self._trim()
        for share in shares_of(upload.header.account, self._tenant_share):
            count = sum(share.is_theirs(other.header.account) for other in self._all)
            most = self._max_uploads * share.part
            if count >= most and not self._drop_oldest(share.is_theirs):
                message = f"{count} of {share.owner_of} are open or resumable; the limit is {int(most)}"
                raise ResourceExhausted("uploads", message, RETRY_SECONDS)
        resident = Counter(other.header.tenant for other in self._all)
        if len(self._all) >= self._max_uploads and not self._make_room(resident, upload.header.tenant):
            message = f"{len(self._all)} are open, which is the limit"
            raise ResourceExhausted("uploads", message, RETRY_SECONDS)
        self._all.add(upload)
        if upload.header.upload_id:
            self._by_key[_key(upload.header)] = upload

    def update_size(self, upload: Upload, num_arrived: int = 0) -> None:
        """Updates the size of an open upload, including `num_arrived` bytes of a chunk that is not added yet. Raises
        ResourceExhausted when a limit is exceeded."""
        self._set_size(upload, upload.num_buffered_bytes + num_arrived)
        for share in shares_of(upload.header.account, self._tenant_share):
            most = int(self._max_bytes * share.part)
            if upload.num_counted > most:
                message = f"it uses {upload.num_counted:,} bytes of memory; the limit of {share.owner_of} is {most:,}"
                raise ResourceExhausted("uploads", message)
            while (resident := self._num_bytes_of(share.is_theirs)) > most:
                if not self._drop_oldest(share.is_theirs):
                    message = f"those of {share.owner_of} use {resident:,} bytes of memory; the limit is {most:,}"
                    raise ResourceExhausted("uploads", message, RETRY_SECONDS)
        while self.num_bytes > self._max_bytes:
            if not self._make_room(self._bytes_by_tenant(), upload.header.tenant):
                message = f"all uploads use too much memory; the limit is {self._max_bytes:,} bytes"
                raise ResourceExhausted("uploads", message, RETRY_SECONDS)

    def _set_size(self, upload: Upload, num_bytes: int) -> None:
        self._num_bytes[upload.header.account] += num_bytes - upload.num_counted
        upload.num_counted = num_bytes

    def forget(self, upload: Upload) -> None:
        """Makes the upload impossible to resume."""
        if self._by_key.get(_key(upload.header)) is upload:
            del self._by_key[_key(upload.header)]
        if upload.idle_since is not None:
            self._remove(upload)

    @asynccontextmanager
    async def lease(self, upload: Upload) -> AsyncGenerator[UploadLease, None]:
        """The body owns `upload`. An upload that cannot be resumed ends with the body."""
        owner = upload.acquire()
        try:
            yield owner
        except LongleafError as error:
            # A document that waits for capacity, for its client or for its end need not be sent again.
            can_go_on = upload.document and isinstance(error, ResourceExhausted | DeadlineExceeded | IncompleteDocument)
            if owner.is_current and not can_go_on:
                self.forget(upload)
                if self.durable is not None and not isinstance(error, Unavailable):
                    self.durable.forget(upload.header)
            raise
        finally:
            if not self.release(owner) and upload.prefill is not None:
                await upload.prefill.stop()

    def release(self, owner: UploadLease) -> bool:
        """Ends the ownership of a stream. Returns whether the ingest is kept or another stream has taken over."""
        upload = owner.upload
        if not owner.is_current:
            return True
        upload.owner, upload.idle_since = None, self.clock()
        if self._by_key.get(_key(upload.header)) is not upload:
            self._remove(upload)
            return False
        self._trim()
        return self._by_key.get(_key(upload.header)) is upload

    def _remove(self, upload: Upload) -> None:
        self._set_size(upload, 0)
        self._all.discard(upload)
        if not self._num_bytes[upload.header.account]:
            del self._num_bytes[upload.header.account]

    def _retained(self) -> list[Upload]:
        """Uploads waiting to be resumed, the oldest first."""
        retained = [(upload.idle_since, upload) for upload in self._by_key.values() if upload.idle_since is not None]
        ordered = sorted(retained, key=lambda entry: entry[0])
        return [upload for _, upload in ordered if not upload.is_prefilling]

    def _drop_oldest(self, is_theirs: Callable[[Account], bool]) -> bool:
        """Drops the oldest idle upload of these accounts. Returns whether there was one."""
        found = next((upload for upload in self._retained() if is_theirs(upload.header.account)), None)
        if found is not None:
            self.forget(found)
        return found is not None

    def _make_room(self, usage: Counter[str], tenant: str = "") -> bool:
        """Drops the oldest idle upload of the tenant with the largest `usage`; another tenant than `tenant`
        must hold more than it. Returns whether an upload was dropped."""
        victim = eviction_victim(usage, {upload.header.tenant for upload in self._retained()}, tenant)
        return victim is not None and self._drop_oldest(lambda other: other[0] == victim)

    def _num_bytes_of(self, is_theirs: Callable[[Account], bool]) -> int:
        return sum(count for account, count in self._num_bytes.items() if is_theirs(account))

    def _bytes_by_tenant(self) -> Counter[str]:
        resident = Counter[str]()
        for (tenant, _), count in self._num_bytes.items():
            resident[tenant] += count
        return resident

    def _trim(self) -> None:
        now = self.clock()
        for upload in self._retained():
            assert upload.idle_since is not None
            self._set_size(upload, upload.num_buffered_bytes)  # work started by its stream may have ended since
            if now - upload.idle_since > self._keep_seconds:
                self.forget(upload)
        while self.num_bytes > self._max_bytes and self._make_room(self._bytes_by_tenant()):
            pass
        if self._timer is None and any(upload.idle_since is not None for upload in self._all):
            self._timer = self._later(TRIM_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._trim()

    def audit(self) -> None:
        """Checks that the recorded bytes of each client match its uploads. Raises AssertionError."""
        counted = Counter[Account]()
        for upload in self._all:
            counted[upload.header.account] += upload.num_counted
        assert +counted == +self._num_bytes, (counted, self._num_bytes)
        assert set(self._by_key.values()) <= self._all
        assert all(u.idle_since is None or self._by_key.get(_key(u.header)) is u for u in self._all)


def _key(header: IngestHeader) -> tuple[str, str]:
    return header.context, header.upload_id
