"""The client for code without an event loop: a thin face of AsyncClient."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable
from typing import Any, Self, TypeVar, Unpack

from longleaf.client.aio import AsyncClient, OnProgress
from longleaf.client.documents import Document
from longleaf.client.retries import DEFAULT_LIMIT, OnRetry, Retries, log_retry
from longleaf.errors import LongleafError
from longleaf.messages import (
    Cluster,
    Context,
    ContextOptions,
    Event,
    GenerateOptions,
    IngestOptions,
    IngestProgress,
    Tokenized,
    Verification,
)

T = TypeVar("T")


class Client:
    """Runs an AsyncClient on an event loop in a thread of its own; see there for what the methods do and raise.

    with Client() as client:
        for event in client.ask("moby", "Who is Queequeg?"):
            ...
    """

    def __init__(
        self, server: str | None = None, *, retries: int | Retries = DEFAULT_LIMIT, on_retry: OnRetry = log_retry
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="longleaf-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_connect(server, retries, on_retry))
        except LongleafError:
            self._end()
            raise

    @property
    def server(self) -> str:
        return self._client.server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._run(_settle())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also an interrupt: nothing goes on behind the caller's back
            future.cancel()
            raise

    def _iterate(self, stream: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (item := self._run(_next(stream))) is not None:
                yield item
        finally:
            if not self._loop.is_closed():  # closing the client has ended the call already
                self._run(_close(stream))

    def generate(
        self, input: str | Iterable[int], *, context: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Event, None, None]:
        return self._iterate(self._client.generate(input, context=context, **options))

    def ask(self, context: str, question: str, **options: Unpack[GenerateOptions]) -> Generator[Event, None, None]:
        return self._iterate(self._client.ask(context, question, **options))

    def cancel_generation(self, request_id: str, *, timeout: float | None = None) -> None:
        self._run(self._client.cancel_generation(request_id, timeout=timeout))

    def ingest(
        self,
        context: str,
        document: Document,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[IngestOptions],
    ) -> Context:
        return self._run(self._client.ingest(context, document, on_progress=on_progress, **options))

    def ingest_steps(
        self, context: str, document: Document, **options: Unpack[IngestOptions]
    ) -> Generator[IngestProgress, None, None]:
        return self._iterate(self._client.ingest_steps(context, document, **options))

    def get_context(self, context: str, *, timeout: float | None = None) -> Context:
        return self._run(self._client.get_context(context, timeout=timeout))

    def list_contexts(self, *, timeout: float | None = None) -> list[Context]:
        return self._run(self._client.list_contexts(timeout=timeout))

    def update_context(
        self, context: str, *, timeout: float | None = None, **settings: Unpack[ContextOptions]
    ) -> Context:
        return self._run(self._client.update_context(context, timeout=timeout, **settings))

    def fork_context(
        self, context: str, new_context: str, *, num_tokens: int | None = None, timeout: float | None = None
    ) -> Context:
        return self._run(self._client.fork_context(context, new_context, num_tokens=num_tokens, timeout=timeout))

    def delete_context(self, context: str, *, timeout: float | None = None) -> None:
        self._run(self._client.delete_context(context, timeout=timeout))

    def count_tokens(self, text: str, *, timeout: float | None = None) -> int:
        return self._run(self._client.count_tokens(text, timeout=timeout))

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        with_spans: bool = False,
        timeout: float | None = None,
    ) -> Tokenized:
        work = self._client.tokenize(
            text, add_special_tokens=add_special_tokens, with_spans=with_spans, timeout=timeout
        )
        return self._run(work)

    def detokenize(
        self, token_ids: Iterable[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        return self._run(self._client.detokenize(token_ids, keep_special_tokens=keep_special_tokens, timeout=timeout))

    def cluster(self, *, timeout: float | None = None) -> Cluster:
        return self._run(self._client.cluster(timeout=timeout))

    def watch_cluster(
        self, *, min_interval: float = 1.0, timeout: float | None = None
    ) -> Generator[Cluster, None, None]:
        return self._iterate(self._client.watch_cluster(min_interval=min_interval, timeout=timeout))

    def verify(
        self,
        text: str | None = None,
        *,
        seed: int = 0,
        num_tokens: int | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Verification:
        work = self._client.verify(text, seed=seed, num_tokens=num_tokens, max_tokens=max_tokens, timeout=timeout)
        return self._run(work)

    def is_healthy(self, service: str = "", *, timeout: float | None = None) -> bool:
        return self._run(self._client.is_healthy(service, timeout=timeout))


async def _connect(server: str | None, retries: int | Retries, on_retry: OnRetry) -> AsyncClient:
    """On the loop's thread: channels belong to the loop that made them."""
    return AsyncClient(server, retries=retries, on_retry=on_retry)


async def _settle() -> None:
    """Ends what is left on the loop: grpc.aio notes the end of a call in a task of its own, which may come late."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()
