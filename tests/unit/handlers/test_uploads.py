"""The retained state of interrupted ingests, and its retention time."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from coordinator.handlers.document_tokenizer import DocumentTokenizer
from coordinator.handlers.resumable_sessions import Lease
from coordinator.handlers.size_limits import SizeLimit
from coordinator.handlers.uploads import PrefillTask, Upload, Uploads
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import InvalidArgument, ResourceExhausted, Unavailable
from longleaf.types import IngestHeader, IngestProgress
from tests.support.service import FakeEngine, FakeStream, load_tokenizer, write_model

pytestmark = pytest.mark.timeout(60)


class Clock:
    """A manual clock. It runs the scheduled calls when it is advanced."""

    def __init__(self) -> None:
        self.now = 0.0
        self.to_come: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float, function: Callable[[], None]) -> "Clock":
        self.to_come.append((self.now + seconds, function))
        return self

    def cancel(self) -> None:
        raise AssertionError("is never cancelled")

    def turn_to(self, now: float) -> None:
        self.now = now
        due = [call for call in self.to_come if call[0] <= now]
        self.to_come = [call for call in self.to_come if call[0] > now]
        for _, function in due:
            function()


def uploads_on(clock: Clock, **limits: float) -> Uploads:
    return Uploads(clock, clock.later, **limits)  # type: ignore[arg-type]


@pytest.fixture
async def threads() -> AsyncIterator[TokenizerPool]:
    threads = TokenizerPool(1)
    yield threads
    await threads.close()


@pytest.fixture
def make(tmp_path: Path, threads: TokenizerPool) -> Callable[..., Upload]:
    tokenizer = load_tokenizer(write_model(tmp_path / "model"))
    limit = SizeLimit(FakeEngine(), None)

    def upload(upload_id: str, num_tokens: int = 0, client: str = "", tenant: str = "default") -> Upload:
        document = DocumentTokenizer(tokenizer.document_encoder(is_first=True), limit, tokenizer.vocabulary_size)
        if num_tokens:
            document.add_ids([1] * num_tokens)
        header = IngestHeader("moby", upload_id=upload_id, client=client, tenant=tenant)
        return Upload(header, document, threads)

    return upload


def leave(uploads: Uploads, upload: Upload) -> bool:
    uploads.add(upload)
    return uploads.sessions.release(upload, uploads.sessions.acquire(upload))


def retained(uploads: Uploads, *upload_ids: str) -> list[bool]:
    return [uploads.find(IngestHeader("moby", upload_id=upload_id)) is not None for upload_id in upload_ids]


def test_upload_is_retained_from_the_end_of_its_stream(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, keep_seconds=10)
    upload = make("a")
    uploads.add(upload)
    lease = uploads.sessions.acquire(upload)
    clock.now = 100
    assert retained(uploads, "a") == [True], "it does not expire while its stream is open"
    assert uploads.sessions.release(upload, lease)
    clock.now = 110
    assert retained(uploads, "a") == [True]
    clock.now = 110.5
    assert retained(uploads, "a") == [False]


def test_oldest_upload_is_evicted(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, max_uploads=4)
    for clock.now, name in enumerate("abc"):
        assert leave(uploads, make(name))
        uploads.sessions.audit()
    assert retained(uploads, "a", "b", "c") == [False, True, True]


def test_upload_memory_is_bounded(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, max_bytes=10_000)
    for clock.now, name in enumerate("abc"):
        leave(uploads, make(name, 1000))
        uploads.sessions.audit()
    assert retained(uploads, "a", "b", "c") == [False, True, True]
    clock.now = 3
    assert not leave(uploads, make("d", 3000)), "an upload above the limit is not retained"


def test_upload_without_an_id_is_not_retained(make: Callable[..., Upload]) -> None:
    uploads = uploads_on(Clock())
    assert not leave(uploads, make(""))
    assert retained(uploads, "") == [False]


def test_ingests_of_other_contexts_or_modes_are_separate(make: Callable[..., Upload]) -> None:
    uploads = uploads_on(Clock())
    leave(uploads, make("a"))
    assert uploads.find(IngestHeader("dick", upload_id="a")) is None
    with pytest.raises(InvalidArgument, match=r"config\.append"):
        uploads.find(IngestHeader("moby", append=True, upload_id="a"))


def test_replaced_stream_does_not_release_the_upload(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, keep_seconds=10)
    upload = make("a")
    uploads.add(upload)
    old, new = uploads.sessions.acquire(upload), uploads.sessions.acquire(upload)
    assert uploads.sessions.release(upload, old)
    assert (old.is_current, new.is_current) == (False, True)
    clock.now = 100
    assert retained(uploads, "a") == [True]


class Blocked:
    """A step in which the only thread blocks until it is released."""

    def __init__(self) -> None:
        self.begun, self.may_continue = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_continue.wait(30)


async def begin(work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def test_waiting_work_is_dropped_with_its_stream(make: Callable[..., Upload], threads: TokenizerPool) -> None:
    upload, blocked = make("a"), Blocked()
    assert upload.document is not None
    first = threads.submit(blocked)
    old = await begin(upload.run_on_document(upload.document.add_ids, [1, 2, 3]))
    settling = await begin(upload.wait_idle())
    old.cancel()
    await asyncio.wait([old])
    await settling
    blocked.may_continue.set()
    await asyncio.wrap_future(first)
    await upload.run_on_document(upload.document.add_ids, [4])
    assert list(upload.document.token_ids) == [4], (
        "the server reported 0 received tokens, and the client sends them again"
    )


async def test_running_work_ends_before_a_new_stream_continues(make: Callable[..., Upload]) -> None:
    upload, blocked = make("a"), Blocked()
    old = await begin(upload.run_on_document(blocked))
    await asyncio.to_thread(blocked.begun.wait, 30)
    old.cancel()
    await asyncio.wait([old])
    settling = await begin(upload.wait_idle())
    assert not settling.done()
    blocked.may_continue.set()
    await settling


def test_retained_uploads_expire_by_timer(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, keep_seconds=100)
    leave(uploads, make("a", 1000))
    clock.turn_to(50)
    leave(uploads, make("b", 1000))
    assert uploads.sessions.num_bytes == 8000
    clock.turn_to(110)
    assert uploads.sessions.num_bytes == 4000
    clock.turn_to(160)
    clock.turn_to(190)
    assert uploads.sessions.num_bytes == 0
    assert not clock.to_come, "no timer remains"
    uploads.sessions.audit()


def test_number_of_uploads_is_bounded_per_client(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, max_uploads=6)
    uploads_of = {client: [make(f"{client}{i}", client=client) for i in range(3)] for client in "ab"}
    leases: list[Lease] = []
    for upload in uploads_of["a"]:
        uploads.add(upload)
        leases.append(uploads.sessions.acquire(upload))
    with pytest.raises(ResourceExhausted, match="3 of client 'a' are open or resumable") as caught:
        uploads.add(make("a3", client="a"))
    assert caught.value.retry_seconds
    for upload in uploads_of["b"]:
        uploads.add(upload)
        uploads.sessions.acquire(upload)
    with pytest.raises(ResourceExhausted, match="6 are open"):
        uploads.add(make("c", client="c"))
    assert uploads.sessions.release(uploads_of["a"][0], leases[0])
    uploads.add(make("c", client="c"))
    assert retained(uploads, "a0", "a1") == [False, True], "the upload without a client was evicted"
    uploads.sessions.audit()


def test_number_of_uploads_is_bounded_per_tenant(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, max_uploads=8, tenant_share=1 / 2)
    leave(uploads, make("bolt's", tenant="bolt"))
    for clock.now, client in enumerate("abcde", 1):
        assert leave(uploads, make(client, client=client, tenant="acme"))
    assert retained(uploads, "bolt's", "a", "b") == [True, False, True], "an upload of the same tenant was evicted"
    for client in "fghi":
        upload = make(client, client=client, tenant="acme")
        uploads.add(upload)
        uploads.sessions.acquire(upload)
    with pytest.raises(ResourceExhausted, match="4 of tenant acme are open or resumable; the limit is 4"):
        uploads.add(make("j", client="j", tenant="acme"))
    assert retained(uploads, "bolt's") == [True]
    uploads.sessions.audit()


def test_upload_of_the_largest_tenant_is_evicted(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, max_uploads=4, tenant_share=3 / 4)
    for clock.now, (name, tenant) in enumerate((("b", "bolt"), ("a", "acme"), ("a2", "acme"), ("a3", "acme"))):
        leave(uploads, make(name, client=name, tenant=tenant))
    leave(uploads, make("b2", client="2", tenant="bolt"))
    assert retained(uploads, "b", "a", "a2", "a3", "b2") == [True, False, True, True, True]
    uploads.sessions.audit()


def test_upload_bytes_are_bounded_per_tenant(make: Callable[..., Upload]) -> None:
    uploads = uploads_on(Clock(), max_bytes=16_000, tenant_share=1 / 2)
    leave(uploads, make("bolt's", 1000, tenant="bolt"))
    for client in "ab":
        upload = make(client, 1000, client, "acme")
        uploads.add(upload)
        uploads.sessions.update_size(upload)
    uploads.add(third := make("c", 1, "c", "acme"))
    with pytest.raises(ResourceExhausted, match="those of tenant acme use 8,004 bytes of memory; the limit is 8,000"):
        uploads.sessions.update_size(third)
    assert retained(uploads, "bolt's") == [True]


def test_bytes_of_open_uploads_are_bounded_per_client(make: Callable[..., Upload]) -> None:
    clock = Clock()
    uploads = uploads_on(clock, max_bytes=16_000)
    for name, num_tokens, client in (("old", 1000, "a"), ("a", 1000, "a"), ("b", 2000, "b")):
        upload = make(name, num_tokens, client)
        uploads.add(upload)
        uploads.sessions.update_size(upload)
        uploads.sessions.audit()
        if name == "old":
            uploads.sessions.release(upload, uploads.sessions.acquire(upload))
    second = make("second", 1000, "a")
    uploads.add(second)
    uploads.sessions.update_size(second)
    assert retained(uploads, "old") == [False], "it was evicted for another upload of its client"
    third = make("third", 1, "a")
    uploads.add(third)
    with pytest.raises(
        ResourceExhausted, match="those of client 'a' use 8,004 bytes of memory; the limit is 8,000"
    ) as caught:
        uploads.sessions.update_size(third)
    assert caught.value.retry_seconds
    other = make("other", 1, "c")
    uploads.add(other)
    with pytest.raises(ResourceExhausted, match="all uploads use too much memory; the limit is 16,000"):
        uploads.sessions.update_size(other)
    uploads.sessions.audit()


def test_document_larger_than_the_limit_is_not_retried(make: Callable[..., Upload]) -> None:
    uploads = uploads_on(Clock(), max_bytes=16_000)
    upload = make("a", 2001)
    uploads.add(upload)
    with pytest.raises(ResourceExhausted, match="it uses 8,004 bytes of memory; the limit of .* is 8,000") as caught:
        uploads.sessions.update_size(upload)
    assert caught.value.retry_seconds is None


def test_ended_uploads_are_not_counted(make: Callable[..., Upload]) -> None:
    uploads = uploads_on(Clock())
    for upload_id in ("", "failed"):
        upload = make(upload_id, 1000)
        uploads.add(upload)
        uploads.sessions.update_size(upload)
        lease = uploads.sessions.acquire(upload)
        assert uploads.sessions.num_bytes == 4000
        uploads.sessions.forget(upload)
        assert uploads.sessions.num_bytes == 4000, "its open stream still holds it"
        assert not uploads.sessions.release(upload, lease)
        assert uploads.sessions.num_bytes == 0
        uploads.sessions.audit()


async def reports(gate: asyncio.Event, error: Exception | None = None) -> AsyncGenerator[IngestProgress, None]:
    yield IngestProgress(phase="prefilling", processed=1)
    await gate.wait()
    if error is not None:
        raise error
    yield IngestProgress(phase="ready")


async def test_running_prefill_is_never_dropped(make: Callable[..., Upload]) -> None:
    clock, gate = Clock(), asyncio.Event()
    uploads = uploads_on(clock, keep_seconds=10)
    upload = make("a", 5)
    upload.begin(PrefillTask(FakeStream((), None, False), reports(gate)))
    assert upload.num_buffered_bytes == 0
    leave(uploads, upload)
    clock.now = 100
    assert retained(uploads, "a") == [True]
    gate.set()
    assert upload.prefill is not None
    assert [report.phase async for report in upload.prefill.progress()][-1] == "ready"
    assert [report.phase async for report in upload.prefill.progress()] == ["ready"]
    assert retained(uploads, "a") == [False]


async def test_error_of_a_prefill_is_raised_for_every_follower() -> None:
    gate = asyncio.Event()
    gate.set()
    prefill = PrefillTask(FakeStream((), None, False), reports(gate, Unavailable("gone")))
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            [report async for report in prefill.progress()]


async def test_abandoned_prefill_closes_its_stream() -> None:
    stream = FakeStream((), None, True)
    prefill = PrefillTask(stream, reports(asyncio.Event()))
    await prefill.stop()
    assert stream.closed.is_set()
