"""Ingests that survive a broken stream."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from coordinator.change_feed import ChangeCounter
from coordinator.handlers.document_tokenizer import DocumentTokenizer, IncompleteDocument
from coordinator.handlers.durable_uploads import DurableUploads, check_same
from coordinator.handlers.fair_share import shares_of
from coordinator.handlers.resumable_sessions import (
    KEEP_SECONDS,
    MAX_BYTES,
    CallLater,
    Lease,
    ResumableSessions,
    call_later,
)
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import DeadlineExceeded, LongleafError, ResourceExhausted, Unavailable
from longleaf.types import IngestHeader, IngestProgress

if TYPE_CHECKING:
    from coordinator.engine.stream import Stream

MAX_UPLOADS = 256


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
    """An ingest: its document while that arrives, then its prefill."""

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
        self._work: Future[None] | None = None
        self._num_taken = document.num_tokens

    @property
    def num_buffered_bytes(self) -> int:
        return self.document.num_buffered_bytes if self.document is not None else 0

    @property
    def is_working(self) -> bool:
        """Whether the prefill is running."""
        return self.prefill is not None and not self.prefill.is_over

    def pop_num_new_tokens(self) -> int:
        """Tokens received since the last call, including those from work that an earlier owner started."""
        num_tokens = self.document.num_tokens if self.document is not None else self._num_taken
        num_new, self._num_taken = num_tokens - self._num_taken, num_tokens
        return num_new

    def begin(self, prefill: PrefillTask) -> None:
        """The engine has taken over the document."""
        self.document, self.prefill = None, prefill

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


class Uploads:
    """All ingests, by context and upload id: those with an open stream, and those that can be resumed. `clock` counts
    seconds; `later` calls a function after a number of seconds.

    See ResumableSessions for the retention and the limits, which apply to each client and each tenant. A running
    prefill is never dropped; the engine limits those.
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
        self.durable = durable
        self.clock = clock
        self.sessions = ResumableSessions[Upload](
            "upload",
            clock,
            later,
            partial(shares_of, tenant_share=tenant_share),
            keep_seconds=keep_seconds,
            max_sessions=max_uploads,
            max_bytes=max_bytes,
        )

    def num_of(self, tenant: str) -> int:
        """Uploads of a tenant that are open or can be resumed, including those of an earlier service."""
        return self.sessions.num_of(tenant) + self.num_retained_of(tenant)

    def num_retained_of(self, tenant: str) -> int:
        """Uploads of a tenant that exist only on disk: those of an earlier service, and those dropped from memory."""
        return len(self._retained_tokens(tenant))

    def num_tokens_of(self, tenant: str) -> int:
        """Tokens of a tenant's uploads whose documents have not been passed to the engine."""
        own = (upload.document for upload in self.sessions if upload.header.tenant == tenant)
        arrived = (document.num_tokens for document in own if document is not None)
        return sum(arrived) + sum(self._retained_tokens(tenant))

    def _retained_tokens(self, tenant: str) -> list[int]:
        """Token count of each upload of a tenant that exists only on disk."""
        return self.durable.tokens_of(tenant, self.sessions.keys) if self.durable is not None else []

    def find(self, header: IngestHeader) -> Upload | None:
        """The ingest that `header` resumes. Raises InvalidArgument if its settings differ from the original ones."""
        upload = self.by_key(header)
        if upload is not None:
            check_same(upload.header, header)
        return upload

    def by_key(self, header: IngestHeader) -> Upload | None:
        """The ingest of that context and upload id, with any settings."""
        return self.sessions.find(_key(header))

    def add(self, upload: Upload) -> None:
        """Raises ResourceExhausted when there are too many."""
        self.sessions.add(upload, upload.header.account, _key(upload.header) if upload.header.upload_id else None)

    @asynccontextmanager
    async def lease(self, upload: Upload, reason: LongleafError | None = None) -> AsyncGenerator[Lease, None]:
        """The body owns `upload`; the stream of the previous owner ends with `reason`, by default Unavailable. An
        upload that cannot be resumed ends with the body."""
        lease = self.sessions.acquire(upload, reason)
        try:
            yield lease
        except LongleafError as error:
            # A document that waits for capacity, for its client or for its end need not be sent again.
            can_go_on = upload.document and isinstance(error, ResourceExhausted | DeadlineExceeded | IncompleteDocument)
            if lease.is_current and not can_go_on:
                self.sessions.forget(upload)
                if self.durable is not None and not isinstance(error, Unavailable):
                    self.durable.forget(upload.header)
            raise
        finally:
            if not self.sessions.release(upload, lease) and upload.prefill is not None:
                await upload.prefill.stop()


def _key(header: IngestHeader) -> tuple[str, str]:
    return header.context, header.upload_id
