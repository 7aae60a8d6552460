"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing, contextmanager
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]

from longleaf import codec
from longleaf.client.documents import Document, Source, size_of
from longleaf.client.upload import Upload
from longleaf.config import default_server
from longleaf.errors import LongleafError, Unavailable, WorkerLost
from longleaf.messages import (
    Cluster,
    Context,
    Event,
    IngestHeader,
    IngestProgress,
    SamplingOptions,
)
from longleaf.status import decode_error
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import cluster_service_pb2_grpc as cluster_grpc
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import context_service_pb2_grpc as context_grpc
from longleaf.v1 import generation_service_pb2_grpc as generation_grpc
from longleaf.v1 import tokenizer_service_pb2 as tokenizer_pb
from longleaf.v1 import tokenizer_service_pb2_grpc as tokenizer_grpc

MAX_MESSAGE_BYTES = 64 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # a machine that vanished ends the call instead of hanging it
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
)

RESUME_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits before an ingest whose connection broke is resumed, while the service gets no further."""

OnProgress = Callable[[IngestProgress], None]


class AsyncClient:
    """Talks to one service. Every call raises the errors of `longleaf.errors`.

    async with AsyncClient("localhost:50051") as client:
        await client.ingest("moby", Path("moby-dick.txt"))
        async for event in client.ask("moby", "Who is Queequeg?", max_tokens=64):
            ...
    """

    def __init__(self, server: str | None = None) -> None:
        """`server` is HOST:PORT; None takes LONGLEAF_SERVER, else localhost:50051."""
        self.server = server or default_server()
        self._channel = grpc.aio.insecure_channel(self.server, options=OPTIONS)
        # The generated stubs carry no types.
        self._generations: Any = generation_grpc.GenerationServiceStub(self._channel)
        self._contexts: Any = context_grpc.ContextServiceStub(self._channel)
        self._tokenizer: Any = tokenizer_grpc.TokenizerServiceStub(self._channel)
        self._cluster: Any = cluster_grpc.ClusterServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and all calls on it."""
        await self._channel.close()

    @contextmanager
    def _typed(self) -> Generator[None, None, None]:
        try:
            yield
        except grpc.RpcError as error:
            raise decode_error(error, self.server) from None

    async def generate(
        self,
        input: str | Iterable[int],
        *,
        context: str | None = None,
        use_chat_template: bool | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Event, None]:
        """Streams one generation from text or token ids: Started, Progress, Delta, and last Finished.

        Closing the iterator, or leaving it by an exception, ends the generation on the service.
        """
        request = codec.encode_generate(input, context=context, use_chat_template=use_chat_template, sampling=sampling)
        call = self._generations.Generate(request)
        try:
            with self._typed():
                async for response in call:
                    yield codec.decode_event(response)
        finally:
            call.cancel()

    def ask(self, context: str, question: str, **sampling: Unpack[SamplingOptions]) -> AsyncGenerator[Event, None]:
        """Streams the answer to a question about a context, which stays as it is."""
        return self.generate(question, context=context, **sampling)

    async def ingest(
        self,
        context: str,
        document: Document,
        *,
        append: bool = False,
        upload_id: str = "",
        on_progress: OnProgress | None = None,
    ) -> Context:
        """Ingests a document as a new context, or at the end of one. Returns once the service acknowledged it.

        A cancelled or failed ingest leaves nothing behind, unless it has an `upload_id`: then the service keeps for a
        while what it received. When the connection breaks, the ingest goes on where it was; and a later call with the
        same document, name and `upload_id` goes on too, or gets the context if it was acknowledged meanwhile.
        """
        result: Context | None = None
        async with aclosing(self.ingest_steps(context, document, append=append, upload_id=upload_id)) as steps:
            async for progress in steps:
                if on_progress is not None:
                    on_progress(progress)
                result = progress.context
        if result is None:
            raise Unavailable(f"{self.server} ended the ingest before acknowledging it")
        return result

    async def ingest_steps(
        self, context: str, document: Document, *, append: bool = False, upload_id: str = ""
    ) -> AsyncGenerator[IngestProgress, None]:
        """As `ingest`, but streams the progress; the last one carries the context."""
        header = IngestHeader(context, append, size_of(document), upload_id)
        source, waits, furthest = Source(document), list(RESUME_SECONDS), -1
        async with aclosing(source):
            while True:
                try:
                    async with aclosing(self._ingest_once(Upload(header, source))) as steps:
                        async for progress in steps:
                            if (reached := _reached(progress)) > furthest:
                                waits, furthest = list(RESUME_SECONDS), reached
                            yield progress
                    return
                except Unavailable as error:
                    if not upload_id or not waits or source.error or isinstance(error, WorkerLost):
                        raise
                await asyncio.sleep(waits.pop(0))

    async def _ingest_once(self, upload: Upload) -> AsyncGenerator[IngestProgress, None]:
        """One stream of an ingest, sending from where the service wants it."""
        call = self._contexts.IngestContext(upload.requests())
        try:
            with self._typed():
                async for response in call:
                    progress = codec.decode_ingest_progress(response)
                    upload.take(progress)
                    yield progress
        except (LongleafError, asyncio.CancelledError) as error:
            if upload.error is not None:  # the call only knows that its upward half broke
                raise upload.error from None
            if isinstance(error, LongleafError) or is_cancelled():
                raise
            # The library cancels a call that ended while it was being sent to.
            raise Unavailable(f"{self.server} ended the ingest") from None
        finally:
            upload.stop()
            call.cancel()

    async def get_context(self, context: str) -> Context:
        """Raises NotFound."""
        with self._typed():
            request = ingest_pb.GetContextRequest(name=codec.context_name(context))
            return codec.decode_context(await self._contexts.GetContext(request))

    async def list_contexts(self) -> list[Context]:
        """All contexts, by id."""
        contexts: list[Context] = []
        token = ""
        with self._typed():
            while True:
                request = ingest_pb.ListContextsRequest(page_token=token)
                page: ingest_pb.ListContextsResponse = await self._contexts.ListContexts(request)
                contexts += map(codec.decode_context, page.contexts)
                token = page.next_page_token
                if not token:
                    return contexts

    async def delete_context(self, context: str) -> None:
        """Raises NotFound."""
        with self._typed():
            await self._contexts.DeleteContext(ingest_pb.DeleteContextRequest(name=codec.context_name(context)))

    async def count_tokens(self, text: str) -> int:
        """Tokens of `text` as a document, without the template's opening."""
        with self._typed():
            request = tokenizer_pb.CountTokensRequest(text=codec.encodable(text, "text"))
            return (await self._tokenizer.CountTokens(request)).token_count

    async def cluster(self) -> Cluster:
        """The model, the ranks and the load."""
        with self._typed():
            return codec.decode_cluster(await self._cluster.GetCluster(cluster_pb.GetClusterRequest()))

    async def is_healthy(self, service: str = "") -> bool:
        """Whether the service (all of it, or one by its full name) can answer now. Raises Unavailable, NotFound."""
        with self._typed():
            answer = await self._health.Check(health_pb2.HealthCheckRequest(service=service))
            return answer.status == health_pb2.HealthCheckResponse.SERVING


def _reached(progress: IngestProgress) -> int:
    """A number that grows with what the service has done."""
    return progress.received_bytes + progress.received_tokens + progress.processed


def is_cancelled() -> bool:
    """Whether somebody cancels the task that asks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
