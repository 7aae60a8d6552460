"""The synchronous client, a thin wrapper of AsyncClient."""

import atexit
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar, Unpack

from longleaf.client.aio import AsyncClient
from longleaf.client.callbacks import Callback, OnProgress
from longleaf.client.channels import Access
from longleaf.client.documents import Document, Readable, off_the_loop
from longleaf.client.loop import LoopThread
from longleaf.client.retries import OnRetry, Retries, Retry, log_retry
from longleaf.codec import BytesLike
from longleaf.types import (
    Cluster,
    Context,
    ContextOptions,
    ContextText,
    Conversation,
    Draining,
    Event,
    ExportedArchive,
    ExportProgress,
    GenerateOptions,
    ImportProgress,
    IngestOptions,
    IngestProgress,
    Message,
    RecomputeResult,
    Tokenized,
    Verification,
)

T = TypeVar("T")


class Client:
    """Runs an AsyncClient on an event loop in a dedicated thread. The methods behave and raise as those of AsyncClient.

    with Client() as client:
        for event in client.ask("moby", "Who is Queequeg?"):
            ...
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        retries: int | Retries | None = None,
        on_retry: OnRetry = log_retry,
        **access: Unpack[Access],
    ) -> None:
        self._loop = LoopThread("longleaf-client")
        try:
            self._client = self._loop.run(_connect, server, access, retries, partial(self._loop.notify, on_retry))
        except BaseException:
            self._loop.close(_nothing)
            raise
        # If a script exits with an open stream, closing it would otherwise wait for a thread that no longer exists.
        atexit.register(self.close)

    @property
    def server(self) -> str:
        return self._client.server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends the thread; pending calls raise Cancelled. Idempotent."""
        atexit.unregister(self.close)
        self._loop.close(self._client.close)

    def _iterate(self, stream: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (item := self._loop.run(_next, stream)) is not None:
                yield item
        finally:
            self._loop.clean_up(partial(_close, stream))

    def generate(
        self,
        input: str | BytesLike | Iterable[int] | Conversation,
        *,
        context: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Event, None, None]:
        return self._iterate(self._client.generate(input, context=context, **options))

    def ask(
        self, context: str, question: str | BytesLike, **options: Unpack[GenerateOptions]
    ) -> Generator[Event, None, None]:
        return self._iterate(self._client.ask(context, question, **options))

    def chat(
        self, messages: Iterable[Message], *, context: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Event, None, None]:
        return self._iterate(self._client.chat(messages, context=context, **options))

    def cancel_generation(self, request_id: str, *, timeout: float | None = None) -> None:
        self._loop.run(self._client.cancel_generation, request_id, timeout=timeout)

    def ingest(
        self,
        context: str,
        document: Document,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[IngestOptions],
    ) -> Context:
        tell = None if on_progress is None else partial(self._loop.notify, on_progress)
        return self._loop.run(self._client.ingest, context, off_the_loop(document), on_progress=tell, **options)

    def ingest_steps(
        self, context: str, document: Document, **options: Unpack[IngestOptions]
    ) -> Generator[IngestProgress, None, None]:
        return self._iterate(self._client.ingest_steps(context, off_the_loop(document), **options))

    def get_context(self, context: str, *, timeout: float | None = None) -> Context:
        return self._loop.run(self._client.get_context, context, timeout=timeout)

    def get_context_text(
        self,
        context: str,
        token_start: int | None = None,
        token_end: int | None = None,
        *,
        byte_start: int | None = None,
        byte_end: int | None = None,
        timeout: float | None = None,
    ) -> ContextText:
        given: dict[str, Any] = {"byte_start": byte_start, "byte_end": byte_end, "timeout": timeout}
        return self._loop.run(self._client.get_context_text, context, token_start, token_end, **given)

    def list_contexts(self, *, timeout: float | None = None) -> list[Context]:
        return self._loop.run(self._client.list_contexts, timeout=timeout)

    def update_context(
        self, context: str, *, timeout: float | None = None, **settings: Unpack[ContextOptions]
    ) -> Context:
        return self._loop.run(self._client.update_context, context, timeout=timeout, **settings)

    def fork_context(
        self,
        context: str,
        new_context: str,
        *,
        num_tokens: int | None = None,
        recompute: bool = False,
        timeout: float | None = None,
    ) -> Context:
        given: dict[str, Any] = {"num_tokens": num_tokens, "recompute": recompute, "timeout": timeout}
        return self._loop.run(self._client.fork_context, context, new_context, **given)

    def recompute_context(self, context: str, *, timeout: float | None = None) -> Context:
        return self._loop.run(self._client.recompute_context, context, timeout=timeout)

    def recompute_contexts(self, *, timeout: float | None = None) -> RecomputeResult:
        return self._loop.run(self._client.recompute_contexts, timeout=timeout)

    def delete_context(self, context: str, *, timeout: float | None = None) -> None:
        self._loop.run(self._client.delete_context, context, timeout=timeout)

    def cancel_ingest(self, context: str, upload_id: str, *, timeout: float | None = None) -> None:
        self._loop.run(self._client.cancel_ingest, context, upload_id, timeout=timeout)

    def export_context(
        self,
        context: str,
        file: Path | BinaryIO,
        *,
        with_keys: bool = True,
        resume: bool = False,
        on_progress: Callable[[ExportProgress], None] | None = None,
        timeout: float | None = None,
    ) -> ExportedArchive:
        tell = None if on_progress is None else partial(self._loop.notify, on_progress)
        options: dict[str, Any] = {"with_keys": with_keys, "resume": resume, "timeout": timeout}
        return self._loop.run(self._client.export_context, context, file, on_progress=tell, **options)

    def import_context(
        self,
        file: Path | Readable,
        name: str | None = None,
        *,
        upload_id: str = "",
        on_progress: Callable[[ImportProgress], None] | None = None,
        timeout: float | None = None,
    ) -> Context:
        tell = None if on_progress is None else partial(self._loop.notify, on_progress)
        return self._loop.run(
            self._client.import_context, file, name, upload_id=upload_id, on_progress=tell, timeout=timeout
        )

    def count_tokens(self, text: str | BytesLike, *, timeout: float | None = None) -> int:
        return self._loop.run(self._client.count_tokens, text, timeout=timeout)

    def tokenize(
        self,
        text: str | BytesLike,
        *,
        add_special_tokens: bool = False,
        with_spans: bool = False,
        timeout: float | None = None,
    ) -> Tokenized:
        return self._loop.run(
            self._client.tokenize, text, add_special_tokens=add_special_tokens, with_spans=with_spans, timeout=timeout
        )

    def detokenize(
        self, token_ids: Iterable[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        return self._loop.run(
            self._client.detokenize, token_ids, keep_special_tokens=keep_special_tokens, timeout=timeout
        )

    def cluster(self, *, timeout: float | None = None) -> Cluster:
        return self._loop.run(self._client.cluster, timeout=timeout)

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
        return self._loop.run(
            self._client.verify, text, seed=seed, num_tokens=num_tokens, max_tokens=max_tokens, timeout=timeout
        )

    def drain(self, *, wait: bool = False, timeout: float | None = None) -> Draining:
        return self._loop.run(self._client.drain, wait=wait, timeout=timeout)

    def reset_slots(self, *, timeout: float | None = None) -> int:
        return self._loop.run(self._client.reset_slots, timeout=timeout)

    def is_healthy(self, service: str = "", *, timeout: float | None = None) -> bool:
        return self._loop.run(self._client.is_healthy, service, timeout=timeout)


async def _connect(
    server: str | None, access: Access, retries: int | Retries | None, on_retry: Callback[Retry]
) -> AsyncClient:
    """Runs on the loop's thread, because a channel belongs to the loop that created it."""
    return AsyncClient(server, retries=retries, on_retry=on_retry, **access)


async def _nothing() -> None:
    pass


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()
