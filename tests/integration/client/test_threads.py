"""The synchronous client between threads: callbacks may call the client, and no caller waits forever."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from longleaf.client import AsyncClient, Client, Retries
from longleaf.client.loop import LoopThread
from longleaf.errors import Cancelled, ResourceExhausted
from longleaf.types import Delta, IngestProgress
from tests.support.service import Served, ids

T = TypeVar("T")
SECONDS = 20.0
QUICK = Retries(first_delay=0.001, longest_delay=0.002)
FULL = ResourceExhausted("pool", "no room now", retry_seconds=0.001)


async def use(function: Callable[[], T]) -> T:
    """The result of `function` in a new thread, which a failing test need not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=work, daemon=True).start()
    async with asyncio.timeout(SECONDS):
        return await done


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110, no notification exists
            await asyncio.sleep(0.005)


@pytest.fixture
def service(service: Served) -> Served:
    service.engine.answer = tuple((token_id,) for token_id in ids("two words"))
    return service


async def closed(service: Served, number: int) -> None:
    """Waits until the service has noticed that a stream has no reader."""
    async with asyncio.timeout(SECONDS):
        await service.engine.streams[number].closed.wait()


async def test_progress_callback_may_call_the_client(service: Served) -> None:
    def work() -> None:
        reported: list[tuple[int, int, str]] = []

        def on_progress(progress: IngestProgress) -> None:
            text = "".join(event.text for event in client.generate("x") if isinstance(event, Delta))
            reported.append((threading.get_ident(), client.count_tokens(progress.phase), text))

        with Client(service.address) as client:
            assert client.ingest("moby", "some text", on_progress=on_progress).id == "moby"
        assert {thread for thread, _, _ in reported} == {threading.get_ident()}
        assert {text for _, _, text in reported} == {"two words"}
        assert reported[0][1] == len("receiving")
        assert reported[-1][1] == len("ready")

    await use(work)


@pytest.mark.parametrize("call", [Client.cluster, lambda client: list(client.generate("x"))], ids=["unary", "stream"])
async def test_retry_callback_may_call_the_client(service: Served, call: Callable[[Client], Any]) -> None:
    def work() -> list[tuple[int, int]]:
        counted: list[tuple[int, int]] = []

        def on_retry(_: object) -> None:
            service.engine.error = None
            counted.append((threading.get_ident(), client.count_tokens("four")))

        with Client(service.address, retries=QUICK, on_retry=on_retry) as client:
            service.engine.error = FULL
            call(client)
        return [(thread - threading.get_ident(), count) for thread, count in counted]

    assert await use(work) == [(0, 4)]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()])
async def test_error_in_a_progress_callback_ends_the_upload_and_is_raised(
    service: Served, error: BaseException
) -> None:
    service.engine.is_endless = True

    def work() -> None:
        def on_progress(progress: IngestProgress) -> None:
            if progress.processed:  # the engine has started: an earlier report may end an upload without a stream
                raise error

        with Client(service.address) as client:
            with pytest.raises(type(error)) as caught:
                client.ingest("moby", "some text", on_progress=on_progress)
            assert caught.value is error
            assert client.list_contexts() == []

    await use(work)
    await closed(service, 0)


async def test_error_in_a_retry_callback_is_raised(service: Served) -> None:
    def on_retry(_: object) -> None:
        raise ValueError("mine")

    def work() -> None:
        with Client(service.address, retries=QUICK, on_retry=on_retry) as client:
            service.engine.error = FULL
            with pytest.raises(ValueError, match="mine"):
                client.cluster()
            with pytest.raises(ValueError, match="mine"):
                next(client.generate("x"))
            service.engine.error = None
            assert client.count_tokens("four") == 4

    await use(work)


async def test_callback_may_close_the_client(service: Served) -> None:
    def work() -> None:
        client = Client(service.address)
        with pytest.raises(Cancelled, match="closed"):
            client.ingest("moby", "some text", on_progress=lambda _: client.close())

    await use(work)


async def test_document_may_be_read_through_the_client_that_sends_it(service: Served) -> None:
    def work() -> int:
        def document() -> Iterator[list[int]]:
            for text in ("four", "three"):
                yield list(client.tokenize(text).token_ids)

        with Client(service.address) as client:
            return client.ingest("moby", document()).tokens

    assert await use(work) == len("fourthree")


async def test_call_from_the_client_loop_does_not_deadlock(service: Served) -> None:
    def work() -> None:
        async def document() -> AsyncIterator[str]:
            yield client.detokenize(ids("four"))

        with Client(service.address) as client:
            with pytest.raises(RuntimeError, match="own event loop"):
                client.ingest("moby", document())
            assert client.list_contexts() == []

    await use(work)


async def test_threads_share_a_client(service: Served) -> None:
    def work(number: int, client: Client, results: dict[int, list[int]]) -> None:
        for size in range(1, 20):
            results[number].append(client.count_tokens("x" * size * number))
            assert [event.text for event in client.generate("x") if isinstance(event, Delta)] == list("two words")

    def start() -> dict[int, list[int]]:
        results: dict[int, list[int]] = {number: [] for number in range(1, 5)}
        with Client(service.address) as client:
            threads = [threading.Thread(target=work, args=(number, client, results)) for number in results]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    results = await use(start)
    assert results == {number: [size * number for size in range(1, 20)] for number in range(1, 5)}


@pytest.mark.parametrize("resumable", [False, True])
async def test_closing_a_client_ends_waiting_calls_in_other_threads(service: Served, resumable: bool) -> None:
    service.engine.is_endless = True
    client = await use(lambda: Client(service.address))
    reading = threading.Event()

    def read() -> None:
        for event in client.generate("x", resumable=resumable):
            if isinstance(event, Delta):
                reading.set()

    def watch() -> None:
        for _ in client.watch_cluster():
            pass

    def ingest() -> None:
        client.ingest("moby", "some text")

    calls = [asyncio.create_task(use(call)) for call in (read, watch, ingest)]
    await use(reading.wait)
    await until(lambda: len(service.engine.streams) == 2 and service.engine.looked.is_set())
    await use(client.close)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, Cancelled), error
    await closed(service, 0)
    await closed(service, 1)


@pytest.mark.parametrize("method", ["_submit", "_result"])
async def test_interrupt_between_two_lines_leaves_no_running_work(
    service: Served, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The interrupt arrives after the work was scheduled and before the loop's thread could handle it."""
    client = await use(lambda: Client(service.address))
    real = getattr(LoopThread, method)

    def interrupted(self: LoopThread, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        if method == "_submit":
            real(self, *arguments, **options)
        raise KeyboardInterrupt

    def work() -> str:
        watch = client.watch_cluster()
        next(watch)
        monkeypatch.setattr(LoopThread, method, interrupted)
        try:
            next(watch)
        except KeyboardInterrupt as error:
            return repr(error.__context__)
        return "no interrupt"

    assert await use(work) == "None"
    await use(client.close)


async def test_closing_while_calls_start_leaves_no_waiting_thread(service: Served) -> None:
    def call(client: Client) -> None:
        with suppress(Cancelled):
            while True:
                client.count_tokens("x")

    for _ in range(10):
        client = await use(lambda: Client(service.address))
        calls = [asyncio.create_task(use(lambda client=client: call(client))) for _ in range(4)]
        await use(lambda client=client: client.count_tokens("x"))
        await asyncio.gather(use(client.close), use(client.close), *calls)


async def test_closed_client_raises_cancelled(service: Served) -> None:
    def work() -> None:
        with Client(service.address) as client:
            begun = client.generate("x")
            next(begun)
        for call in (client.cluster, client.list_contexts, lambda: next(client.generate("x")), lambda: list(begun)):
            with pytest.raises(Cancelled, match="closed"):
                call()
        begun.close()
        client.close()

    await use(work)


async def test_garbage_collector_may_end_a_stream_on_the_client_loop(service: Served) -> None:
    service.engine.is_endless = True

    def work() -> None:
        with Client(service.address) as client:
            stream = client.generate("x")
            next(stream)
            cycle: list[Any] = [stream]
            cycle.append(cycle)
            gc.disable()
            try:
                del cycle, stream

                class Document:
                    def __aiter__(self) -> "Document":
                        return self

                    async def __anext__(self) -> str:
                        gc.collect()
                        raise StopAsyncIteration

                with pytest.raises(Exception, match="empty"):
                    client.ingest("moby", Document())
            finally:
                gc.enable()
            assert client.count_tokens("four") == 4

    await use(work)
    await closed(service, 0)


async def test_asynchronous_client_awaits_its_callbacks(service: Served) -> None:
    counted: list[int] = []

    async def on_progress(progress: IngestProgress) -> None:
        counted.append(await service.client.count_tokens(progress.phase))

    async def on_retry(_: object) -> None:
        service.engine.error = None
        counted.append(await client.count_tokens("x"))

    assert (await service.client.ingest("moby", "some text", on_progress=on_progress)).id == "moby"
    assert (counted[0], counted[-1]) == (len("receiving"), len("ready"))
    async with AsyncClient(service.address, retries=QUICK, on_retry=on_retry) as client:
        service.engine.error = FULL
        await client.cluster()
    assert counted[-1] == 1


async def test_closing_the_asynchronous_client_ends_running_streams(service: Served) -> None:
    service.engine.is_endless = True
    client = AsyncClient(service.address)

    async def read() -> None:
        async for _ in client.generate("x"):
            service.engine.opened.set()

    async def ingest() -> None:
        await client.ingest("moby", "some text")

    calls = [asyncio.create_task(read()), asyncio.create_task(ingest())]
    await until(lambda: len(service.engine.streams) == 2)
    async with asyncio.timeout(SECONDS):
        await client.close()
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, Cancelled), error
        for call in (client.cluster(), client.ingest("moby", "x"), anext(client.generate("x"))):
            with pytest.raises(Cancelled, match="closed"):
                await call
