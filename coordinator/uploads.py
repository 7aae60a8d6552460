"""Ingests that outlive a broken stream."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing

from coordinator.document import Document
from coordinator.generation import EventStream
from coordinator.text_threads import TextThreads
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.messages import IngestHeader, IngestProgress

KEEP_SECONDS = 600.0
"""How long an ingest without a stream is kept."""
MAX_KEPT = 256
MAX_KEPT_BYTES = 256 << 20
"""Memory of the documents kept: about 64 million tokens."""


class Prefill:
    """The second half of an ingest, as a task of its own: it needs no stream that listens."""

    def __init__(self, stream: EventStream, reports: AsyncGenerator[IngestProgress, None]) -> None:
        """`reports` are made of what `stream` says."""
        self._stream = stream
        self._reports = reports
        self.latest: IngestProgress | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def _run(self) -> None:
        try:
            async with aclosing(self._reports) as reports:
                async for self.latest in reports:
                    self._tell()
        except Exception as error:
            self._error = error
        finally:
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self) -> AsyncIterator[IngestProgress]:
        """The reports from now on; a slow reader gets the latest ones. Raises what ended the prefill."""
        told = None
        while True:
            changed, is_over = self._changed, self.is_over
            if self.latest is not None and self.latest is not told:
                told = self.latest
                yield told
            elif self._error is not None:
                raise self._error
            elif is_over:
                return
            else:
                await changed.wait()

    async def stop(self) -> None:
        """Gives it up, wherever it is."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stream.aclose()


class Upload:
    """An ingest: its document while that arrives, then its prefill. The stream that claimed it last owns it."""

    def __init__(
        self, header: IngestHeader, document: Document, threads: TextThreads, deadline: float | None = None
    ) -> None:
        self.header = header
        self._threads = threads
        self.deadline = deadline
        """When nobody waits for it any more, in seconds on the engine's clock."""
        self.document: Document | None = document
        """None once its ids are with the engine."""
        self.prefill: Prefill | None = None
        self.num_claims = 0
        self.idle_since: float | None = None
        """When the last stream left; None while there is one."""
        self._work: Future[None] | None = None

    @property
    def num_held_bytes(self) -> int:
        return self.document.num_held_bytes if self.document is not None else 0

    @property
    def is_prefilling(self) -> bool:
        return self.prefill is not None and not self.prefill.is_over

    def begin(self, prefill: Prefill) -> None:
        """The document is with the engine."""
        self.document, self.prefill = None, prefill

    def claim(self) -> int:
        """The number by which the new owner is known."""
        self.num_claims += 1
        self.idle_since = None
        return self.num_claims

    def check_owner(self, claim: int) -> None:
        """Raises Unavailable when another stream took over."""
        if claim != self.num_claims:
            raise Unavailable("another stream goes on with this upload")

    async def work(self, function: Callable[..., None], *arguments: object) -> None:
        """Runs a short method of the document in a thread. If the caller is cancelled, it runs to its end, or not at
        all: the document is whole either way."""
        self._work = self._threads.submit(function, *arguments)
        await asyncio.wrap_future(self._work)

    async def settle(self) -> None:
        """Waits for work that an earlier owner left behind. Raises what it raised."""
        if self._work is not None:
            work = asyncio.wrap_future(self._work)
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()


class Uploads:
    """The resumable ingests, by context and upload id. `clock` counts seconds.

    What nobody listens to is kept for `keep_seconds`, and at most `max_kept` of it, of `max_bytes` together: the
    oldest is dropped first. A prefill under way is never dropped; the engine bounds those.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        keep_seconds: float = KEEP_SECONDS,
        max_kept: int = MAX_KEPT,
        max_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._clock = clock
        self._keep_seconds, self._max_kept, self._max_bytes = keep_seconds, max_kept, max_bytes
        self._by_key: dict[tuple[str, str], Upload] = {}

    def find(self, header: IngestHeader) -> Upload | None:
        """The ingest that `header` goes on with. Raises InvalidArgument when it began in another way."""
        self._trim()
        upload = self._by_key.get(_key(header))
        if upload is not None and upload.header.append != header.append:
            raise InvalidArgument("config.append", "is not what this upload began with")
        return upload

    def add(self, upload: Upload) -> None:
        if upload.header.upload_id:
            self._by_key[_key(upload.header)] = upload

    def forget(self, upload: Upload) -> None:
        """Nothing of it can be resumed any more."""
        if self._by_key.get(_key(upload.header)) is upload:
            del self._by_key[_key(upload.header)]

    def leave(self, upload: Upload, claim: int) -> bool:
        """The stream of `claim` has ended. Says whether the ingest is kept, or goes on with another stream."""
        if claim == upload.num_claims:
            upload.idle_since = self._clock()
        self._trim()
        return claim != upload.num_claims or self._by_key.get(_key(upload.header)) is upload

    def _trim(self) -> None:
        now = self._clock()
        idle = [(u.idle_since, u) for u in self._by_key.values() if u.idle_since is not None and not u.is_prefilling]
        idle.sort(key=lambda entry: entry[0], reverse=True)
        num_bytes = 0
        for number, (since, upload) in enumerate(idle, 1):
            num_bytes += upload.num_held_bytes
            if now - since > self._keep_seconds or number > self._max_kept or num_bytes > self._max_bytes:
                self.forget(upload)


def _key(header: IngestHeader) -> tuple[str, str]:
    return header.context, header.upload_id
