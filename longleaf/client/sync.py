"""The client for code without an event loop: a thin face of AsyncClient."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable
from typing import Any, Self, TypeVar, Unpack

from longleaf.client.aio import AsyncClient, OnProgress
from longleaf.client.documents import Document
from longleaf.messages import Cluster, Context, Event, IngestProgress, SamplingOptions

T = TypeVar("T")


class Client:
    """Runs an AsyncClient on an event loop in a thread of its own; see there for what the methods do and raise.

    with Client() as client:
        for event in client.ask("moby", "Who is Queequeg?"):
            ...
    """

    def __init__(self, server: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="longleaf-client", daemon=True)
        self._thread.start()
        self._client = self._run(_connect(server))

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
        self,
        input: str | Iterable[int],
        *,
        context: str | None = None,
        use_chat_template: bool | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Event, None, None]:
        stream = self._client.generate(input, context=context, use_chat_template=use_chat_template, **sampling)
        return self._iterate(stream)

    def ask(self, context: str, question: str, **sampling: Unpack[SamplingOptions]) -> Generator[Event, None, None]:
        return self._iterate(self._client.ask(context, question, **sampling))

    def ingest(
        self,
        context: str,
        document: Document,
        *,
        append: bool = False,
        upload_id: str = "",
        on_progress: OnProgress | None = None,
    ) -> Context:
        return self._run(
            self._client.ingest(context, document, append=append, upload_id=upload_id, on_progress=on_progress)
        )

    def ingest_steps(
        self, context: str, document: Document, *, append: bool = False, upload_id: str = ""
    ) -> Generator[IngestProgress, None, None]:
        return self._iterate(self._client.ingest_steps(context, document, append=append, upload_id=upload_id))

    def get_context(self, context: str) -> Context:
        return self._run(self._client.get_context(context))

    def list_contexts(self) -> list[Context]:
        return self._run(self._client.list_contexts())

    def delete_context(self, context: str) -> None:
        self._run(self._client.delete_context(context))

    def count_tokens(self, text: str) -> int:
        return self._run(self._client.count_tokens(text))

    def cluster(self) -> Cluster:
        return self._run(self._client.cluster())

    def is_healthy(self, service: str = "") -> bool:
        return self._run(self._client.is_healthy(service))


async def _connect(server: str | None) -> AsyncClient:
    """On the loop's thread: channels belong to the loop that made them."""
    return AsyncClient(server)


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()
