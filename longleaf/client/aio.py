"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Self, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]

from longleaf import codec
from longleaf.client.archives import ArchiveTarget, FileTarget, export, import_archive
from longleaf.client.archives import header_of as archive_header
from longleaf.client.callbacks import Callback, notify
from longleaf.client.calls import Calls, nothing
from longleaf.client.channels import Access
from longleaf.client.documents import Document, Readable, UploadSource
from longleaf.client.generation_stream import GenerationStream, can_resume
from longleaf.client.retries import Retries, Retry, log_retry, was_refused
from longleaf.client.upload import header_of, ingest_of, reach_of, upload
from longleaf.codec import BytesLike
from longleaf.config import default_server, with_port
from longleaf.errors import InvalidArgument, LongleafError, Unavailable
from longleaf.types import (
    Cluster,
    Context,
    ContextOptions,
    ContextSettings,
    ContextText,
    Conversation,
    Draining,
    Event,
    ExportContext,
    ExportedArchive,
    ExportProgress,
    ForkContext,
    GenerateOptions,
    GetContextText,
    ImportProgress,
    IngestOptions,
    IngestProgress,
    Message,
    RecomputeResult,
    Tokenized,
    Verification,
    Verify,
)
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import cluster_service_pb2_grpc as cluster_grpc
from longleaf.v1 import context_service_pb2 as context_pb
from longleaf.v1 import context_service_pb2_grpc as context_grpc
from longleaf.v1 import generation_service_pb2_grpc as generation_grpc
from longleaf.v1 import tokenizer_service_pb2 as tokenizer_pb
from longleaf.v1 import tokenizer_service_pb2_grpc as tokenizer_grpc

CANCEL_SECONDS = 1.0
"""Longest wait for the request that cancels an abandoned generation."""


class AsyncClient:
    """A client of one service. Every call raises the errors of `longleaf.errors`.

    Each call accepts a `timeout` in seconds for the whole call, including streaming and retries; None sets no limit.
    Calls that the service refuses for lack of capacity are retried after the delay that it names. Calls without a
    response are retried if that is idempotent: reads, and generations that have produced no event.

    async with AsyncClient("localhost:50051") as client:
        await client.ingest("moby", Path("moby-dick.txt"))
        async for event in client.ask("moby", "Who is Queequeg?", max_tokens=64):
            ...
    """

    _called = ""
    """The name of the service in error messages; empty for its address."""

    def __init__(
        self,
        server: str | None = None,
        *,
        retries: int | Retries | None = None,
        on_retry: Callback[Retry] = log_retry,
        **access: Unpack[Access],
    ) -> None:
        """Connects to `server`: HOST:PORT, or HOST for the default port. None uses LONGLEAF_SERVER, then
        localhost:50051.

        `retries` is the maximum number of retries per call (0 disables retries), or a `Retries` policy. By default a
        call is retried for one minute if the service has answered before, and a few times otherwise. `on_retry` is
        called before each wait.

        `access` configures TLS and authentication: `tls_ca` enables encryption, `tls_cert` and `tls_key` are the client
        certificate, and `credential` identifies the caller. Missing values are read from LONGLEAF_TLS_CA,
        LONGLEAF_TLS_CERT, LONGLEAF_TLS_KEY and LONGLEAF_CREDENTIAL. Raises InvalidArgument for unusable files, and for
        a credential that would be sent in plain text.
        """
        self.server = with_port(server or default_server())
        chosen = retries if isinstance(retries, Retries) else Retries(limit=retries)
        self._attach(Calls(self.server, access, chosen, on_retry, self._called))

    def _attach(self, calls: Calls) -> None:
        channel = calls.channel
        self._calls = calls
        # The generated stubs carry no types.
        self._contexts: Any = context_grpc.ContextServiceStub(channel)
        self._generations: Any = generation_grpc.GenerationServiceStub(channel)
        self._tokenizer: Any = tokenizer_grpc.TokenizerServiceStub(channel)
        self._cluster: Any = cluster_grpc.ClusterServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._streams: set[GenerationStream] = set()
        self._cancellations: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Pending calls raise Cancelled."""
        while self._streams:
            self._cancel_abandoned(self._streams.pop())
        await asyncio.gather(*self._cancellations)
        await self._calls.close()

    async def generate(
        self,
        input: str | BytesLike | Iterable[int] | Conversation,
        *,
        context: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Event, None]:
        """Streams a generation from text (bytes are UTF-8), token ids or a conversation: Started, Progress and Delta
        events, then one Finished. If the service loses ranks, Recovering events follow, and the next Delta continues
        with the next index.

        Closing the iterator, or leaving it with an exception, cancels the generation. A resumable generation with a
        `request_id` is instead cancelled by the service after one minute without a reader.
        """
        reception = GenerationStream(input, context, options)
        del input  # the request has a copy, which is freed when the service answers
        self._streams.add(reception)
        try:
            async with aclosing(self._events(reception)) as events:
                async for event in events:
                    yield event
        finally:
            if reception in self._streams:  # closing the client has already abandoned all generations
                self._streams.remove(reception)
                self._cancel_abandoned(reception)

    async def _events(self, reception: GenerationStream) -> AsyncGenerator[Event, None]:
        """The events of one generation, across reconnections."""
        attempts = self._calls.attempts("Generate", reception.timeout)
        while True:
            try:
                method = self._generations.Generate
                events = self._calls.stream(method, reception.request(), attempts, codec.decode_event)
                async with aclosing(events):
                    async for event in events:
                        if event is not None and reception.accept(event):
                            attempts.reset_limits()
                            yield event
                return
            except LongleafError as error:
                if not (reception.is_resumable and can_resume(error)):
                    raise
                await attempts.wait(error, is_repeatable=True)

    def _cancel_abandoned(self, reception: GenerationStream) -> None:
        """Cancels an abandoned generation in the background, unless the caller can resume it."""
        if (request_id := reception.abandoned_id) is not None:
            farewell = asyncio.create_task(self._cancel_quietly(request_id))
            self._cancellations.add(farewell)
            farewell.add_done_callback(self._cancellations.discard)

    async def _cancel_quietly(self, request_id: str) -> None:
        with suppress(LongleafError):  # the service then cancels it when its hold time expires
            await self.cancel_generation(request_id, timeout=CANCEL_SECONDS)

    async def cancel_generation(self, request_id: str, *, timeout: float | None = None) -> None:
        """Cancels a resumable generation, with or without a reader. Raises NotFound."""
        request = codec.encode_cancel(request_id)
        await self._calls.once(self._generations.CancelGeneration, "CancelGeneration", request, nothing, timeout)

    def ask(
        self, context: str, question: str | BytesLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Streams the answer to a question about a context. The context is not changed."""
        return self.generate(question, context=context, **options)

    def chat(
        self, messages: Iterable[Message], *, context: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Streams the model's next turn in a conversation that ends with a user message, optionally about a context."""
        return self.generate(Conversation(tuple(messages)), context=context, **options)

    async def ingest(
        self,
        context: str,
        document: Document,
        *,
        on_progress: Callback[IngestProgress] | None = None,
        **options: Unpack[IngestOptions],
    ) -> Context:
        """Ingests a document as a new context, or appends it to an existing one. Returns once the service has
        acknowledged it.

        A cancelled or failed ingest is discarded, unless it has an `upload_id`: then the service keeps the received
        part for a limited time. If the connection breaks or the service lacks capacity, the ingest resumes at the last
        acknowledged offset. A later call with the same document, name and `upload_id` also resumes, or returns the
        context if it was acknowledged meanwhile.
        """
        result: Context | None = None
        async with aclosing(self.ingest_steps(context, document, **options)) as steps:
            async for progress in steps:
                if on_progress is not None:
                    await notify(on_progress, progress)
                result = progress.context or result
        if result is None:
            raise Unavailable(f"{self.server} ended the ingest before acknowledging it")
        return result

    async def ingest_steps(
        self, context: str, document: Document, **options: Unpack[IngestOptions]
    ) -> AsyncGenerator[IngestProgress, None]:
        """Like `ingest`, but streams the progress. The last message carries the context.

        Without an `upload_id`, the call is retried only until the service requests the document, because a part of the
        source may have been consumed after that.
        """
        header = header_of(context, document, options)
        attempts, furthest = self._calls.attempts("IngestContext", options.get("timeout")), -1
        async with aclosing(UploadSource(document)) as source:
            while True:
                sending, ingest = ingest_of(header, source), self._contexts.IngestContext
                steps = upload(self._calls, ingest, sending, codec.decode_ingest_progress, attempts.time_left())
                try:
                    async with aclosing(steps):
                        async for progress in steps:
                            if (reached := reach_of(progress)) > furthest or progress.recovering is not None:
                                furthest = max(furthest, reached)
                                attempts.reset_limits()
                            yield progress
                    return
                except LongleafError as error:
                    is_retained = header.upload_id and (can_resume(error) or was_refused(error))
                    if source.error or (furthest >= 0 and not is_retained):
                        raise
                    await attempts.wait(error, is_repeatable=True)

    async def get_context(self, context: str, *, timeout: float | None = None) -> Context:
        """Raises NotFound."""
        request = context_pb.GetContextRequest(name=codec.context_name(context))
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
        request = context_pb.ListContextsRequest()
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
        self,
        context: str,
        new_context: str,
        *,
        num_tokens: int | None = None,
        recompute: bool = False,
        timeout: float | None = None,
    ) -> Context:
        """Creates a context from the first `num_tokens` tokens of another one (default: all). The two share these
        tokens; nothing is copied. Models with recurrent states can be continued at some positions only: elsewhere the
        fork is refused or, with `recompute`, the tokens after the nearest one before are computed again. Raises
        NotFound, AlreadyExists, InvalidArgument."""
        request = codec.encode_fork(ForkContext(context, new_context, num_tokens, recompute))
        return await self._calls.once(self._contexts.ForkContext, "ForkContext", request, codec.decode_context, timeout)

    async def recompute_context(self, context: str, *, timeout: float | None = None) -> Context:
        """Recomputes, with the current checkpoint, a context that another checkpoint in the same folder ingested. The
        context stays evicted until its first request. Raises NotFound, AlreadyExists, and CheckpointChanged if the
        tokenizer differs."""
        request = context_pb.RecomputeContextRequest(name=codec.context_name(context))
        return await self._calls.once(
            self._contexts.RecomputeContext, "RecomputeContext", request, codec.decode_context, timeout
        )

    async def recompute_contexts(self, *, timeout: float | None = None) -> RecomputeResult:
        """Recomputes all contexts that another checkpoint ingested, like `recompute_context`. The result lists the
        contexts that were skipped."""
        request = context_pb.RecomputeContextsRequest()
        return await self._calls.once(
            self._contexts.RecomputeContexts, "RecomputeContexts", request, codec.decode_recompute, timeout
        )

    async def delete_context(self, context: str, *, timeout: float | None = None) -> None:
        """Raises NotFound."""
        request = context_pb.DeleteContextRequest(name=codec.context_name(context))
        await self._calls.once(self._contexts.DeleteContext, "DeleteContext", request, nothing, timeout)

    async def cancel_ingest(self, context: str, upload_id: str, *, timeout: float | None = None) -> None:
        """Cancels an ingest by its upload id and discards its data; a pending ingest call raises Cancelled. Raises
        NotFound, including when the context already exists."""
        upload_id = codec.check_utf8(upload_id, "upload_id")
        request = context_pb.CancelIngestRequest(name=codec.context_name(context), upload_id=upload_id)
        await self._calls.once(self._contexts.CancelIngest, "CancelIngest", request, nothing, timeout)

    async def export_context(
        self,
        context: str,
        file: Path | BinaryIO,
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
        resumes, for ten minutes while the same service process runs. Raises AlreadyExists,
        CheckpointChanged if the service has another model, and InvalidArgument if the file is damaged or not an
        archive.
        """
        header, result = archive_header(file, name, upload_id), None
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

    async def count_tokens(self, text: str | BytesLike, *, timeout: float | None = None) -> int:
        """The number of tokens of `text` as a document, without the opening of the chat template."""
        request = tokenizer_pb.CountTokensRequest(text=codec.to_text(text, "text"))
        return await self._calls.read(
            self._tokenizer.CountTokens, "CountTokens", request, attrgetter("token_count"), timeout
        )

    async def tokenize(
        self,
        text: str | BytesLike,
        *,
        add_special_tokens: bool = False,
        with_spans: bool = False,
        timeout: float | None = None,
    ) -> Tokenized:
        """The token ids of a text. `add_special_tokens` adds those that begin a prompt; `with_spans` adds the character
        range of each token."""
        request = tokenizer_pb.TokenizeRequest(
            text=codec.to_text(text, "text"), add_special_tokens=add_special_tokens, return_spans=with_spans
        )
        return await self._calls.read(self._tokenizer.Tokenize, "Tokenize", request, codec.decode_tokenized, timeout)

    async def detokenize(
        self, token_ids: Iterable[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of token ids. Special tokens are dropped unless `keep_special_tokens` is set."""
        request = tokenizer_pb.DetokenizeRequest(
            token_ids=codec.encode_ids(token_ids), keep_special_tokens=keep_special_tokens
        )
        return await self._calls.read(self._tokenizer.Detokenize, "Detokenize", request, attrgetter("text"), timeout)

    async def cluster(self, *, timeout: float | None = None) -> Cluster:
        """The model, the ranks and the load."""
        request = cluster_pb.GetClusterRequest()
        return await self._calls.read(self._cluster.GetCluster, "GetCluster", request, codec.decode_cluster, timeout)

    async def watch_cluster(
        self, *, min_interval: float = 1.0, timeout: float | None = None
    ) -> AsyncGenerator[Cluster, None]:
        """Yields the cluster now and after each change, at most once every `min_interval` seconds. Raises Unavailable
        when the service stops."""
        request = codec.encode_watch(min_interval)
        attempts = self._calls.attempts("WatchCluster", timeout)
        watching = self._calls.stream(self._cluster.WatchCluster, request, attempts, attrgetter("cluster"))
        async with aclosing(watching) as messages:
            async for message in messages:
                yield self._calls.decoded(codec.decode_cluster, message)

    async def verify(
        self,
        text: str | None = None,
        *,
        seed: int = 0,
        num_tokens: int | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Verification:
        """Compares the ranks' logits for a short prompt with those of plain attention on one rank. The prompt is
        `text`, or `num_tokens` random ids drawn with `seed`; `max_tokens` tokens are decoded after it. Other requests
        wait during the comparison."""
        request = codec.encode_verify(Verify(text=text, seed=seed, num_tokens=num_tokens, max_tokens=max_tokens))
        decode = codec.decode_verification
        return await self._calls.read(self._cluster.VerifyCluster, "VerifyCluster", request, decode, timeout)

    async def drain(self, *, wait: bool = False, timeout: float | None = None) -> Draining:
        """Shuts the service down; permitted only from its own machine. New calls are refused, and running calls get a
        limited time to finish. With `wait`, returns when all calls have finished or were aborted. Never retried,
        because another service may answer the second attempt. Raises PermissionDenied, and Unavailable if the service
        fails meanwhile."""
        request = cluster_pb.DrainRequest(wait=wait)
        return await self._calls.once(self._cluster.Drain, "Drain", request, codec.decode_draining, timeout)

    async def reset_slots(self, *, timeout: float | None = None) -> int:
        """Starts ranks in slots whose replacements failed, and returns the number of slots; permitted only from
        its own machine. Raises PermissionDenied."""
        request, count = cluster_pb.ResetSlotsRequest(), attrgetter("slot_count")
        return await self._calls.once(self._cluster.ResetSlots, "ResetSlots", request, count, timeout)

    async def is_healthy(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Whether the service as a whole, or the one with the given full name, can answer now. Raises Unavailable,
        NotFound."""
        request = health_pb2.HealthCheckRequest(service=service)
        status = await self._calls.read(self._health.Check, "Check", request, attrgetter("status"), timeout)
        return status == health_pb2.HealthCheckResponse.SERVING


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
