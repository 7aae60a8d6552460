"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from operator import attrgetter
from typing import Any, Self, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]

from longleaf import codec
from longleaf.client.callbacks import Callback, tell
from longleaf.client.calls import Calls, nothing
from longleaf.client.channels import Access
from longleaf.client.contexts import ContextMethods
from longleaf.client.documents import Document, UploadSource
from longleaf.client.generation_stream import GenerationStream, may_go_on
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
"""Longest wait to tell the service that a generation is not wanted any more."""


class AsyncClient(ContextMethods):
    """Talks to one service. Every call raises the errors of `longleaf.errors`.

    A call may be given a `timeout`: seconds for all of it, streaming and retries included; None sets no limit. What
    the service refused for lack of room is tried again after the wait that it names; what it did not answer is tried
    again where that cannot do a thing twice: reads, and generations of which nothing has come yet.

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
        """`server` is HOST:PORT, or HOST for the default port; None takes LONGLEAF_SERVER, else localhost:50051.
        `retries` is how often a call is tried again at most, 0 for never, or how exactly; by default for a minute where
        the service has answered before, else a few times. `on_retry` is told before each wait. `access` says how to
        come in where a service does not let everybody: with `tls_ca` the connection is encrypted, `tls_cert` and
        `tls_key` are the client's own, `credential` says who calls. What is not given is taken from LONGLEAF_TLS_CA,
        LONGLEAF_TLS_CERT, LONGLEAF_TLS_KEY and LONGLEAF_CREDENTIAL. Raises InvalidArgument
        for files that cannot be used, and for a credential that would travel in plain text."""
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
        """Ends the connection, and all calls on it. What still waits raises Cancelled."""
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
        """Streams one generation from text (bytes are UTF-8), token ids or a conversation: Started, Progress, Delta,
        and last Finished. Where the service loses ranks, Recovering comes between them, and the next Delta has the next
        index.

        Closing the iterator, or leaving it by an exception, ends the generation on the service; one that is resumable
        and was given a `request_id` ends there when nobody has read it for a minute.
        """
        reception = GenerationStream(input, context, options)
        del input  # the request has a copy, which goes when the service answers
        self._receptions.add(reception)
        try:
            async with aclosing(self._events(reception)) as events:
                async for event in events:
                    yield event
        finally:
            if reception in self._receptions:  # closing the client has left all
                self._receptions.remove(reception)
                self._leave(reception)

    async def _events(self, reception: GenerationStream) -> AsyncGenerator[Event, None]:
        """The events of one generation, over as many calls as it takes."""
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
                if not (reception.is_resumable and may_go_on(error)):
                    raise
                await attempts.wait(error, is_repeatable=True)

    def _leave(self, reception: GenerationStream) -> None:
        """Tells the service, behind the caller's back, that nobody will come back to a generation."""
        if (request_id := reception.orphan) is not None:
            farewell = asyncio.create_task(self._say_farewell(request_id))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _say_farewell(self, request_id: str) -> None:
        with suppress(LongleafError):  # then it ends when its time is up
            await self.cancel_generation(request_id, timeout=FAREWELL_SECONDS)

    async def cancel_generation(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a resumable generation, whoever reads it or will come back to it. Raises NotFound."""
        request = codec.encode_cancel(request_id)
        await self._calls.once(self._generations.CancelGeneration, "CancelGeneration", request, nothing, timeout)

    def ask(
        self, context: str, question: str | BytesLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Streams the answer to a question about a context, which stays as it is."""
        return self.generate(question, context=context, **options)

    def chat(
        self, messages: Iterable[Message], *, context: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Streams the model's next turn of a conversation, whose last message is the user's; with a context, of one
        about it."""
        return self.generate(Conversation(tuple(messages)), context=context, **options)

    async def ingest(
        self,
        context: str,
        document: Document,
        *,
        on_progress: Callback[IngestProgress] | None = None,
        **options: Unpack[IngestOptions],
    ) -> Context:
        """Ingests a document as a new context, or at the end of one. Returns once the service acknowledged it.

        A cancelled or failed ingest leaves nothing behind, unless it has an `upload_id`: then the service keeps for a
        while what it received. When the connection breaks, or there is no room for it, the ingest goes on where it was;
        and a later call with the same document, name and `upload_id` goes on too, or gets the context if it was
        acknowledged meanwhile.
        """
        result: Context | None = None
        async with aclosing(self.ingest_steps(context, document, **options)) as steps:
            async for progress in steps:
                if on_progress is not None:
                    await tell(on_progress, progress)
                result = progress.context or result
        if result is None:
            raise Unavailable(f"{self.server} ended the ingest before acknowledging it")
        return result

    async def ingest_steps(
        self, context: str, document: Document, **options: Unpack[IngestOptions]
    ) -> AsyncGenerator[IngestProgress, None]:
        """As `ingest`, but streams the progress; the last one carries the context.

        Without an `upload_id` it is tried again only until the service has asked for the document: a part of its
        source may be gone then.
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
                    is_retained = header.upload_id and (may_go_on(error) or was_refused(error))
                    if source.error or (furthest >= 0 and not is_retained):
                        raise
                    await attempts.wait(error, is_repeatable=True)

    async def count_tokens(self, text: str | BytesLike, *, timeout: float | None = None) -> int:
        """Tokens of `text` as a document, without the template's opening."""
        request = tokenizer_pb.CountTokensRequest(text=codec.as_text(text, "text"))
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
        """The token ids of a text; with the special tokens that begin a prompt, and with each token's place, if so
        asked."""
        request = tokenizer_pb.TokenizeRequest(
            text=codec.as_text(text, "text"), add_special_tokens=add_special_tokens, return_spans=with_spans
        )
        return await self._calls.read(self._tokenizer.Tokenize, "Tokenize", request, codec.decode_tokenized, timeout)

    async def detokenize(
        self, token_ids: Iterable[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of token ids. Special tokens have none, unless they are kept."""
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
        """The cluster now, and again whenever it changed, at most every `min_interval` seconds. Raises Unavailable
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
        """Holds the ranks' logits of a short prompt against those of plain attention on one rank. The prompt is `text`,
        or `num_tokens` ids drawn with `seed`; `max_tokens` are decoded after it. Meanwhile others wait a little."""
        request = codec.encode_verify(Verify(text=text, seed=seed, num_tokens=num_tokens, max_tokens=max_tokens))
        decode = codec.decode_verification
        return await self._calls.read(self._cluster.VerifyCluster, "VerifyCluster", request, decode, timeout)

    async def drain(self, *, wait: bool = False, timeout: float | None = None) -> Draining:
        """Ends the service, from its own machine only: it takes no new calls, and lets what runs end for a while. With
        `wait` the answer comes when all has ended, or was told why it could not. Made once: another service may answer
        the second time. Raises PermissionDenied, and Unavailable when the service fails meanwhile."""
        request = cluster_pb.DrainRequest(wait=wait)
        return await self._calls.once(self._cluster.Drain, "Drain", request, codec.decode_draining, timeout)

    async def refill(self, *, timeout: float | None = None) -> int:
        """Starts ranks in the places that the service gave up, from its own machine only; in how many. Raises
        PermissionDenied."""
        request, count = cluster_pb.RefillSlotsRequest(), attrgetter("slot_count")
        return await self._calls.once(self._cluster.RefillSlots, "RefillSlots", request, count, timeout)

    async def is_healthy(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Whether the service (all of it, or one by its full name) can answer now. Raises Unavailable, NotFound."""
        request = health_pb2.HealthCheckRequest(service=service)
        status = await self._calls.read(self._health.Check, "Check", request, attrgetter("status"), timeout)
        return status == health_pb2.HealthCheckResponse.SERVING
