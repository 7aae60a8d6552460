"""Calls that read, change, export and import contexts."""

from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

from longleaf import codec
from longleaf.client.archives import ArchiveTarget, FileTarget, Writable, export, header_of, import_archive
from longleaf.client.callbacks import Callback, notify
from longleaf.client.calls import Calls, nothing
from longleaf.client.documents import Readable, UploadSource
from longleaf.errors import InvalidArgument, LongleafError, Unavailable
from longleaf.types import (
    Context,
    ContextOptions,
    ContextSettings,
    ContextText,
    ExportContext,
    ExportedArchive,
    ExportProgress,
    ForkContext,
    GetContextText,
    ImportProgress,
    RecomputeResult,
)
from longleaf.v1 import context_service_pb2 as ingest_pb


class ContextMethods:
    """The context methods of a client, except ingestion."""

    def __init__(self, calls: Calls, contexts: Any) -> None:
        """`contexts` is the stub of the service; generated stubs carry no types."""
        self._calls = calls
        self._contexts = contexts

    async def get_context(self, context: str, *, timeout: float | None = None) -> Context:
        """Raises NotFound."""
        request = ingest_pb.GetContextRequest(name=codec.context_name(context))
        return await self._calls.read(self._contexts.GetContext, "GetContext", request, codec.decode_context, timeout)

    async def get_context_text(
        self,
        context: str,
        token_start: int | None = None,
        token_end: int | None = None,
        *,
        byte_start: int | None = None,
        byte_end: int | None = None,
        timeout: float | None = None,
    ) -> ContextText:
        """The text of tokens [start, end) of a context, or of bytes [start, end) of the concatenated ingested texts.
        Returns whole characters, at most 1 MiB, with the file and line at which the text starts. Raises NotFound,
        InvalidArgument for a range outside the context, and FailedPrecondition for a byte range of a context that was
        ingested as token ids."""
        request = codec.encode_get_text(text_range(context, (token_start, token_end), (byte_start, byte_end)))
        return await self._calls.read(
            self._contexts.GetContextText, "GetContextText", request, codec.decode_context_text, timeout
        )

    async def list_contexts(self, *, timeout: float | None = None) -> list[Context]:
        """All contexts, sorted by id."""
        contexts: list[Context] = []
        attempts = self._calls.attempts("ListContexts", timeout)
        request = ingest_pb.ListContextsRequest()
        while True:
            page, token = await self._calls.unary(
                self._contexts.ListContexts, request, attempts, codec.decode_contexts, is_repeatable=True
            )
            contexts += page
            if not token:
                return contexts
            if token == request.page_token:
                raise LongleafError(f"{self._calls.called} lists the same page again")
            request.page_token = token

    async def update_context(
        self, context: str, *, timeout: float | None = None, **settings: Unpack[ContextOptions]
    ) -> Context:
        """Changes the display name, the pin or the expiry of a context, and nothing else. The expiry is either
        `ttl`, in seconds from now, or `expires`, in seconds since the Unix epoch (None: never). Raises NotFound."""
        request = codec.encode_update(context, ContextSettings(**settings))
        return await self._calls.once(
            self._contexts.UpdateContext, "UpdateContext", request, codec.decode_context, timeout
        )

    async def fork_context(
        self, context: str, new_context: str, *, num_tokens: int | None = None, timeout: float | None = None
    ) -> Context:
        """Creates a context from the first `num_tokens` tokens of another one (default: all). The two share these
        tokens; nothing is copied. Raises NotFound, AlreadyExists."""
        request = codec.encode_fork(ForkContext(context, new_context, num_tokens))
        return await self._calls.once(self._contexts.ForkContext, "ForkContext", request, codec.decode_context, timeout)

    async def recompute_context(self, context: str, *, timeout: float | None = None) -> Context:
        """Recomputes, with the current checkpoint, a context that another checkpoint in the same folder ingested. The
        context stays evicted until its first request. Raises NotFound, AlreadyExists, and CheckpointChanged if the
        tokenizer differs."""
        request = ingest_pb.RereadContextRequest(name=codec.context_name(context))
        return await self._calls.once(
            self._contexts.RereadContext, "RereadContext", request, codec.decode_context, timeout
        )

    async def recompute_contexts(self, *, timeout: float | None = None) -> RecomputeResult:
        """Recomputes all contexts that another checkpoint ingested, like `recompute_context`. The result lists the
        contexts that were skipped."""
        request = ingest_pb.RereadContextsRequest()
        return await self._calls.once(
            self._contexts.RereadContexts, "RereadContexts", request, codec.decode_recompute, timeout
        )

    async def delete_context(self, context: str, *, timeout: float | None = None) -> None:
        """Raises NotFound."""
        request = ingest_pb.DeleteContextRequest(name=codec.context_name(context))
        await self._calls.once(self._contexts.DeleteContext, "DeleteContext", request, nothing, timeout)

    async def cancel_ingest(self, context: str, upload_id: str, *, timeout: float | None = None) -> None:
        """Cancels an ingest by its upload id and discards its data; a pending ingest call raises Cancelled. Raises
        NotFound, including when the context already exists."""
        upload_id = codec.check_utf8(upload_id, "upload_id")
        request = ingest_pb.CancelIngestRequest(name=codec.context_name(context), upload_id=upload_id)
        await self._calls.once(self._contexts.CancelIngest, "CancelIngest", request, nothing, timeout)

    async def export_context(
        self,
        context: str,
        file: Path | Writable,
        *,
        with_keys: bool = True,
        resume: bool = False,
        on_progress: Callback[ExportProgress] | None = None,
        timeout: float | None = None,
    ) -> ExportedArchive:
        """Writes a context to an archive, which `import_context` accepts on any service with the same model. Without
        keys the archive is small, and the importing service recomputes keys and values.

        A path is written as PATH.part and renamed at the end. With `resume`, the export continues an earlier PATH.part;
        this raises FailedPrecondition if the context has changed since. A broken connection is resumed automatically.
        Raises NotFound, and InvalidArgument if the file already exists.
        """
        target = await FileTarget.open(file, resume=resume) if isinstance(file, Path) else ArchiveTarget(file)
        wanted = ExportContext(context=context, with_keys=with_keys)
        try:
            steps = export(self._calls, self._contexts.ExportContext, wanted, target, timeout)
            async with aclosing(steps):
                async for progress in steps:
                    if on_progress is not None:
                        await notify(on_progress, progress)
        finally:
            await target.close()
        return ExportedArchive(target.num_bytes, target.digest)

    async def import_context(
        self,
        file: Path | Readable,
        name: str | None = None,
        *,
        upload_id: str = "",
        on_progress: Callback[ImportProgress] | None = None,
        timeout: float | None = None,
    ) -> Context:
        """Imports an archive as a new context called `name`, or under its original name. The context is evicted until
        its first request. Returns once the context is durable.

        A broken connection is resumed automatically. A later call with the same file, name and `upload_id` also
        resumes, for ten minutes and only while the same service process runs. Raises AlreadyExists,
        CheckpointChanged if the service has another model, and InvalidArgument if the file is damaged or not an
        archive.
        """
        header, result = header_of(file, name, upload_id), None
        async with aclosing(UploadSource(file)) as source:
            steps = import_archive(self._calls, self._contexts.ImportContext, header, source, timeout)
            async with aclosing(steps):
                async for progress in steps:
                    if on_progress is not None:
                        await notify(on_progress, progress)
                    result = progress.context or result
        if result is None:
            raise Unavailable(f"{self._calls.called} ended the import before the context was created")
        return result


def text_range(
    context: str, tokens: tuple[int | None, int | None], of_bytes: tuple[int | None, int | None]
) -> GetContextText:
    """Raises InvalidArgument unless exactly one complete range is given."""
    match tokens, of_bytes:
        case ((int(start), int(end)), (None, None)):
            return GetContextText(context, "tokens", start, end)
        case ((None, None), (int(start), int(end))):
            return GetContextText(context, "bytes", start, end)
        case _:
            raise InvalidArgument("range", "give token_start and token_end, or byte_start and byte_end")
