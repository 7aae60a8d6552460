"""Ingests, from the first chunk to the acknowledged context."""

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from coordinator import engine_messages
from coordinator.auth.caller import CALLER, OWNER
from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.handlers.document_tokenizer import STEP_BYTES, DocumentTokenizer
from coordinator.handlers.prompt_encoder import SYSTEM, Prompts
from coordinator.handlers.resumable_sessions import IDLE_SECONDS, next_message
from coordinator.handlers.size_limits import SizeLimit
from coordinator.handlers.uploads import PrefillTask, Upload, Uploads
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from coordinator.text.vocabulary import STEP_TOKENS
from longleaf.errors import (
    AlreadyExists,
    Cancelled,
    CheckpointChanged,
    ContextLost,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
)
from longleaf.types import (
    Context,
    IngestHeader,
    IngestPhase,
    IngestPiece,
    IngestProgress,
    Progress,
    Recovering,
    expired,
)

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine
    from coordinator.engine.stream import Stream

REPORT_BYTES = 1 << 18
"""Bytes of text received between two reports."""
REPORT_TOKENS = 1 << 16
"""Token ids received between two reports."""


class Ingest:
    """Runs ingests on an engine, with the clock of `uploads`. `wall_clock` counts seconds since the epoch."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        threads: TokenizerPool,
        uploads: Uploads,
        wall_clock: Callable[[], float] = time.time,
        idle_seconds: float = IDLE_SECONDS,
        quotas: QuotaEnforcer = UNLIMITED,
    ) -> None:
        self._engine = engine
        self._quotas = quotas
        self._tokenizer = tokenizer
        self._prompts = Prompts(engine, tokenizer, threads)
        self._threads = threads
        self._clock = uploads.clock
        self._wall_clock = wall_clock
        self._uploads = uploads
        self._idle_seconds = idle_seconds

    async def run(
        self, pieces: AsyncIterator[IngestPiece], seconds: float | None = None
    ) -> AsyncGenerator[IngestProgress, None]:
        """Yields progress; the last report has the context. Closing the iterator drops the ingest, unless it has an
        upload id: then it can be resumed.

        The client waits `seconds`, if given. Raises InvalidArgument, NotFound, AlreadyExists, ResourceExhausted,
        DeadlineExceeded, Unavailable or RankLost.
        """
        arrived = self._clock()
        header = await self._next(pieces)
        if not isinstance(header, IngestHeader):
            raise InvalidArgument("config", "must be in the first request only")
        upload = self._find_upload(header)
        if upload is None and (made := self._finished_report(header)) is not None:
            yield made
            return
        upload = upload or await self._create_upload(header, None if seconds is None else arrived + seconds)
        async with self._uploads.lease(upload) as lease, aclosing(lease.run(self._resume(upload, pieces))) as reports:
            async for report in reports:
                yield report

    async def cancel(self, context: str, upload_id: str) -> None:
        """Ends an ingest and deletes its data. Raises NotFound, including when the context has already been created."""
        header = IngestHeader(context=context, upload_id=upload_id)
        was_kept = self._uploads.durable is not None and self._uploads.durable.forget(header)
        upload = self._uploads.by_key(header)
        latest = upload.prefill.latest if upload is not None and upload.prefill is not None else None
        is_there = (latest is not None and latest.context is not None) or self._finished_report(header) is not None
        if upload is not None and not is_there:
            cancelled = Cancelled(f"the ingest into contexts/{context} was cancelled")
            async with self._uploads.lease(upload, cancelled):  # the upload ends with this owner
                self._uploads.sessions.forget(upload)
        if is_there or (upload is None and not was_kept):
            raise NotFound(f"upload {upload_id} of contexts/{context}")

    def _find_upload(self, header: IngestHeader) -> Upload | None:
        """The ingest to resume, if there is one."""
        upload = self._uploads.find(header) if header.upload_id else None
        if upload is not None and upload.document is not None:
            upload.document.expect(header.total_bytes)
        ready = upload.prefill.latest if upload is not None and upload.prefill is not None else None
        if upload is None or ready is None or ready.context is None:
            return upload
        try:
            is_there = self._engine.get_context(header.context).created == ready.context.created
        except (NotFound, ContextLost):
            is_there = False
        if not is_there:  # deleted since: the name is free, or belongs to another context
            self._uploads.sessions.forget(upload)
        return upload if is_there else None

    def _finished_report(self, header: IngestHeader) -> IngestProgress | None:
        """The report of a finished ingest that created the last document of its context, which is not read again."""
        try:
            is_made = bool(header.upload_id) and self._engine.last_upload_id(header.context) == header.upload_id
        except (NotFound, ContextLost, CheckpointChanged):
            return None
        return IngestProgress(phase="ready", context=self._engine.get_context(header.context)) if is_made else None

    async def _create_upload(self, header: IngestHeader, deadline: float | None) -> Upload:
        """Raises NotFound, AlreadyExists or InvalidArgument before a long text is sent, and the error of a dropped
        context that is to be appended to."""
        header.settings.check(self._wall_clock(), "config")
        if header.settings.capacity is not UNSET:
            self._engine.check_capacity(header.settings.capacity)
        limit = self._limit(header)
        retained = self._uploads.durable
        is_retained = retained is not None and retained.has(header)
        self._quotas.check_rate_in()
        self._check_tokens(header, 1)
        self._check_upload(header, is_retained)
        opening = await self._prompts.opening(header.system, limit) if header.system else None
        if header.upload_id and (known := self._find_upload(header)) is not None:
            return known  # another stream has added it in the meantime
        encoder = self._tokenizer.document_encoder(is_first=not header.append, opening=opening)
        document = DocumentTokenizer(encoder, limit, self._tokenizer.vocabulary_size, header.files)
        if retained is not None:
            await retained.load(header, document)
        document.expect(header.total_bytes)
        # An ingest that can be resumed outlives the deadline of its client.
        upload = Upload(header, document, self._threads, None if header.upload_id else deadline)
        self._check_upload(header, is_retained)  # other uploads may have started in the meantime
        self._uploads.add(upload)
        return upload

    def _check_upload(self, header: IngestHeader, is_durable: bool) -> None:
        """Whether the ingest may start or resume. Raises ResourceExhausted."""
        self._quotas.check_upload(self._uploads.num_retained_of(header.tenant) if is_durable else 0)

    def _check_tokens(self, header: IngestHeader, num_tokens: int = 0) -> None:
        """Whether the quotas allow an upload `num_tokens` more tokens. Raises ResourceExhausted."""
        self._quotas.check_context(0 if header.append else 1, num_tokens)

    def _limit(self, header: IngestHeader) -> SizeLimit:
        """The largest size of the document that can fit."""
        try:
            resident = self._engine.num_tokens(header.context)
        except (NotFound, ContextLost, CheckpointChanged):
            if header.append:
                raise
            resident = 0
        else:
            if not header.append:
                raise AlreadyExists(f"contexts/{header.context}")
        return SizeLimit(self._engine, self._tokenizer.max_bytes_per_token, resident)

    async def _resume(self, upload: Upload, pieces: AsyncIterator[IngestPiece]) -> AsyncGenerator[IngestProgress, None]:
        await upload.wait_idle()
        if upload.document is not None:  # without a local name: the ids must be freed once the prefill owns them
            async with aclosing(self._receive(upload, upload.document, pieces)) as reports:
                async for report in reports:
                    yield report
            yield _report("prefilling", upload.document, total=upload.document.num_tokens)
            upload.begin(self._prefill(upload, upload.document))
            self._uploads.sessions.update_size(upload)
        assert upload.prefill is not None
        async for report in upload.prefill.progress():
            yield report

    async def _receive(
        self, upload: Upload, document: DocumentTokenizer, pieces: AsyncIterator[IngestPiece]
    ) -> AsyncGenerator[IngestProgress, None]:
        """Raises DeadlineExceeded if the stream is idle for too long, and InvalidArgument if the context expires in the
        meantime."""
        progress = _report("receiving", document)
        self._quotas.charge_input(upload.pop_num_new_tokens())
        yield progress
        while (piece := await self._next(pieces, upload.header.settings.ingest_expiry)) is not None:
            self._uploads.sessions.update_size(upload, _num_bytes(piece))
            steps = _add_piece(upload, document, piece)
            del piece  # it may be large, and the next one may take long to arrive
            async for _ in steps:
                self._quotas.charge_input(upload.pop_num_new_tokens())
                self._uploads.sessions.update_size(upload)
                self._check_tokens(upload.header)
                if self._uploads.durable is not None:
                    self._uploads.durable.persist(upload.header, document)
                report = _report("receiving", document)
                if _is_update(report, progress):
                    progress = report
                    yield report
            del steps
        # Once this report is sent, it is certain that the client ended the stream and that the stream did not break.
        yield _report("tokenizing", document)
        document.check_size()
        await upload.run_on_document(document.finish)
        self._quotas.charge_input(upload.pop_num_new_tokens())

    async def _next(self, pieces: AsyncIterator[IngestPiece], expires: float | None = None) -> IngestPiece | None:
        """The next chunk; None at the end. Raises DeadlineExceeded, and InvalidArgument from the time `expires` on."""
        left = math.inf if expires is None else expires - self._wall_clock()
        if left <= 0:
            raise expired()
        try:
            return await next_message(pieces, min(left, self._idle_seconds), "ingest")
        except DeadlineExceeded:
            if left < self._idle_seconds:
                raise expired() from None
            raise

    def _prefill(self, upload: Upload, document: DocumentTokenizer) -> PrefillTask:
        """Raises AlreadyExists, NotFound, InvalidArgument, ResourceExhausted, DeadlineExceeded or Unavailable."""
        header = upload.header
        scheduling = engine_messages.SchedulingParams(
            priority=header.priority,
            tenant=header.tenant,
            client=header.client,
            is_alone=CALLER.get(OWNER).is_alone,
            deadline=upload.deadline,
        )
        requested = engine_messages.DocumentPrompt(
            context=header.context,
            token_ids=document.token_ids,
            append=header.append,
            settings=header.settings,
            upload_id=header.upload_id,
            text=document.text,
            scheduling=scheduling,
        )
        self._check_tokens(header)
        stream = self._engine.ingest(requested)
        begun = _report("prefilling", document, total=document.num_tokens)
        return PrefillTask(stream, self._reports(header, stream, begun))

    async def _reports(
        self, header: IngestHeader, stream: "Stream", report: IngestProgress
    ) -> AsyncGenerator[IngestProgress, None]:
        began = self._clock()
        async for event in stream:
            match event:
                case Recovering():
                    report = replace(report, phase="recovering", recovering=event)
                case Progress(processed):
                    seconds = self._clock() - began
                    speed = processed / seconds if seconds > 0 else 0.0
                    counts = {"processed": processed, "tokens_per_second": speed}
                    report = replace(report, phase="prefilling", recovering=None, **counts)
                case _:
                    continue
            yield report
        context = self._acknowledged(header)
        if self._uploads.durable is not None:
            self._uploads.durable.forget(header)
        yield replace(report, phase="ready", processed=report.total, context=context, recovering=None)

    def _acknowledged(self, header: IngestHeader) -> Context:
        """Raises NotFound if the context has just been deleted, and InvalidArgument if it has expired."""
        try:
            return self._engine.get_context(header.context)
        except NotFound:
            expires = header.settings.ingest_expiry
            if expires is not None and expires <= self._wall_clock():
                raise expired() from None
            raise


async def _add_piece(upload: Upload, document: DocumentTokenizer, piece: IngestPiece) -> AsyncIterator[None]:
    """Adds a chunk; yields after each step of work. Raises InvalidArgument."""
    match piece:
        case IngestHeader():
            raise InvalidArgument("config", "must be in the first request only")
        case bytes():
            for start in range(0, len(piece), STEP_BYTES):
                document.receive(piece[start : start + STEP_BYTES])
                if document.should_flush:
                    await upload.run_on_document(document.digest)
                    yield
        case _:
            if upload.header.system:
                raise InvalidArgument(SYSTEM, "requires a document of text; token_ids are used unchanged")
            for start in range(0, len(piece), STEP_TOKENS):
                await upload.run_on_document(document.add_ids, piece[start : start + STEP_TOKENS], start)
                yield
    yield


def _num_bytes(piece: IngestPiece) -> int:
    """Approximate bytes of memory."""
    match piece:
        case IngestHeader():
            return 0
        case bytes():
            return len(piece)
        case _:
            return 4 * len(piece)


def _report(phase: IngestPhase, document: DocumentTokenizer, total: int = 0) -> IngestProgress:
    return IngestProgress(
        phase=phase, received_bytes=document.num_bytes, received_tokens=document.num_tokens, total=total
    )


def _is_update(report: IngestProgress, last: IngestProgress) -> bool:
    if report.received_bytes:
        return report.received_bytes - last.received_bytes >= REPORT_BYTES
    return report.received_tokens - last.received_tokens >= REPORT_TOKENS
