"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from operator import attrgetter
from typing import Any, Self, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]

from longleaf import codec
from longleaf.client.callbacks import Callback, notify
from longleaf.client.calls import Calls, nothing
from longleaf.client.channels import Access
from longleaf.client.contexts import ContextMethods
from longleaf.client.documents import Document, UploadSource
from longleaf.client.generation_stream import GenerationStream, can_resume
from longleaf.client.retries import Retries, Retry, log_retry, was_refused
from longleaf.client.upload import header_of, ingest_of, reach_of, upload
from longleaf.codec import BytesLike
from longleaf.config import default_server, with_port
from longleaf.errors import LongleafError, Unavailable
from longleaf.types import (
    Cluster,
    Context,
    Conversation,
    Draining,
    Event,
    GenerateOptions,
    IngestOptions,
    IngestProgress,
    Message,
    Tokenized,
    Verification,
    Verify,
)
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import cluster_service_pb2_grpc as cluster_grpc
from longleaf.v1 import context_service_pb2_grpc as context_grpc
from longleaf.v1 import generation_service_pb2_grpc as generation_grpc
from longleaf.v1 import tokenizer_service_pb2 as tokenizer_pb
from longleaf.v1 import tokenizer_service_pb2_grpc as tokenizer_grpc

FAREWELL_SECONDS = 1.0
"""Longest wait for the request that cancels an abandoned generation."""


class AsyncClient(ContextMethods):
    """A client of one service. Every call raises the errors of `longleaf.errors`.

    Each call accepts a `timeout` in seconds for the whole call, including streaming and retries; None sets no limit.
    Calls that the service refuses for lack of capacity are retried after the delay that it names. Calls without a
    response are retried if that is idempotent: reads, and generations that have produced no event.

    async with AsyncClient("localhost:50051") as client:
        await client.ingest("moby", Path("moby-dick.txt"))
        async for event in client.ask("moby", "Who is Queequeg?", max_tokens=64):
            ...
    """

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
        self._attach(Calls(self.server, access, chosen, on_retry))

    def _attach(self, calls: Calls) -> None:
        channel = calls.channel
        super().__init__(calls, context_grpc.ContextServiceStub(channel))
        # The generated stubs carry no types.
        self._generations: Any = generation_grpc.GenerationServiceStub(channel)
        self._tokenizer: Any = tokenizer_grpc.TokenizerServiceStub(channel)
        self._cluster: Any = cluster_grpc.ClusterServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._receptions: set[GenerationStream] = set()
        self._farewells: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Pending calls raise Cancelled."""
        while self._receptions:
            self._leave(self._receptions.pop())
        await asyncio.gather(*self._farewells)
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
        self._receptions.add(reception)
        try:
            async with aclosing(self._events(reception)) as events:
                async for event in events:
                    yield event
        finally:
            if reception in self._receptions:  # closing the client has already abandoned all generations
                self._receptions.remove(reception)
                self._leave(reception)

    async def _events(self, reception: GenerationStream) -> AsyncGenerator[Event, None]:
        """The events of one generation, across reconnections."""
        attempts = self._calls.attempts("Generate", reception.timeout)
        while True:
            try:
                method = self._generations.Generate
                events = self._calls.stream(method, reception.request(), attempts, codec.decode_event)
                async with aclosing(events):
                    async for event in events:
                        if event is not None and reception.take(event):
                            attempts.renew()
                            yield event
                return
            except LongleafError as error:
                if not (reception.is_resumable and can_resume(error)):
                    raise
                await attempts.wait(error, is_repeatable=True)

    def _leave(self, reception: GenerationStream) -> None:
        """Cancels an abandoned generation in the background, unless the caller can resume it."""
        if (request_id := reception.orphan) is not None:
            farewell = asyncio.create_task(self._say_farewell(request_id))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _say_farewell(self, request_id: str) -> None:
        with suppress(LongleafError):  # the service then cancels it when its hold time expires
            await self.cancel_generation(request_id, timeout=FAREWELL_SECONDS)

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
                                attempts.renew()
                            yield progress
                    return
                except LongleafError as error:
                    is_retained = header.upload_id and (can_resume(error) or was_refused(error))
                    if source.error or (furthest >= 0 and not is_retained):
                        raise
                    await attempts.wait(error, is_repeatable=True)

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

    async def refill(self, *, timeout: float | None = None) -> int:
        """Starts ranks in slots whose replacements failed, and returns the number of slots; permitted only from
        its own machine. Raises PermissionDenied."""
        request, count = cluster_pb.RefillSlotsRequest(), attrgetter("slot_count")
        return await self._calls.once(self._cluster.RefillSlots, "RefillSlots", request, count, timeout)

    async def is_healthy(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Whether the service as a whole, or the one with the given full name, can answer now. Raises Unavailable,
        NotFound."""
        request = health_pb2.HealthCheckRequest(service=service)
        status = await self._calls.read(self._health.Check, "Check", request, attrgetter("status"), timeout)
        return status == health_pb2.HealthCheckResponse.SERVING
