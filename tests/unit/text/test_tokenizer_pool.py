"""Texts are tokenized in turns, step by step; a cancelled text gets no further step."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar

import pytest

from coordinator.text.tokenizer_pool import STEP_CHARACTERS, TokenizerPool
from longleaf.errors import Unavailable

pytestmark = pytest.mark.timeout(60)
LONG = 5 * STEP_CHARACTERS


class Recorder:
    """Records turns; each step waits until it is allowed."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.begun = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def take(self, name: str) -> None:
        self.turns.append(name)
        self.begun.release()
        assert self._allowed.acquire(timeout=30)


class Encoder:
    """One text."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name, self._recorder = name, recorder
        self.num_characters = 0
        self.is_finished = False

    def push(self, text: str) -> None:
        self._recorder.take(self._name)
        self.num_characters += len(text)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
async def threads() -> AsyncIterator[TokenizerPool]:
    threads = TokenizerPool(1)
    yield threads
    await threads.close()


async def until_begun(recorder: Recorder) -> None:
    assert await asyncio.to_thread(recorder.begun.acquire, timeout=30)


async def begin(threads: TokenizerPool, recorder: Recorder, *names: str) -> list[asyncio.Task[None]]:
    """Long texts that take turns; the step of the first one has begun."""
    tasks = [asyncio.create_task(threads.encode(Encoder(name, recorder), "x" * LONG)) for name in names]
    await until_begun(recorder)
    return tasks


@pytest.mark.parametrize("size", [0, 1, STEP_CHARACTERS, STEP_CHARACTERS + 1, LONG])
async def test_text_is_passed_unchanged(threads: TokenizerPool, size: int) -> None:
    recorder, steps = Recorder(), []
    recorder.allow(10)
    encoder = Encoder("a", recorder)
    await threads.encode(encoder, "x" * size, lambda: steps.append(encoder.is_finished))
    assert (encoder.num_characters, encoder.is_finished) == (size, True)
    assert steps == [False] * (len(steps) - 1) + [True]
    assert len(steps) == max(1, -(-size // STEP_CHARACTERS))


async def test_short_text_waits_for_one_step_of_each_long_text(threads: TokenizerPool) -> None:
    recorder = Recorder()
    long = await begin(threads, recorder, "a", "b")
    short = asyncio.create_task(threads.encode(Encoder("short", recorder), "x"))
    recorder.allow(3)
    await short
    assert recorder.turns[:3] == ["a", "b", "short"]
    recorder.allow(10)
    await asyncio.gather(*long)
    assert recorder.turns[3:] == ["a", "b"] * 4


async def test_tenants_take_turns() -> None:
    """The number of texts of a tenant does not matter."""
    names = ContextVar("names", default="")
    recorder, threads = Recorder(), TokenizerPool(1, tenant=names.get)

    def run(name: str, tenant: str) -> asyncio.Task[None]:
        token = names.set(tenant)
        task = asyncio.create_task(threads.encode(Encoder(name, recorder), "x"))
        names.reset(token)
        return task

    tasks = [run("a0", "acme")]
    await until_begun(recorder)
    tasks += [run(f"a{number}", "acme") for number in range(1, 5)]
    await asyncio.sleep(0)
    tasks += [run("b0", "bolt"), run("b1", "bolt"), run("c0", "cove")]
    await asyncio.sleep(0)
    recorder.allow(8)
    await asyncio.gather(*tasks)
    assert recorder.turns == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]
    await threads.close()


async def test_cancelled_text_gets_no_further_step(threads: TokenizerPool) -> None:
    recorder = Recorder()
    tasks = await begin(threads, recorder, "a", "b", "c")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    recorder.allow(2)
    await threads.encode(Encoder("next", recorder), "x")
    assert recorder.turns == ["a", "next"]


async def test_error_after_a_step_ends_the_text(threads: TokenizerPool) -> None:
    recorder = Recorder()
    recorder.allow(9)

    def refuse() -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await threads.encode(Encoder("a", recorder), "x" * LONG, refuse)
    assert recorder.turns == ["a"]


async def test_close_drops_waiting_texts_and_does_not_wait_for_a_long_step() -> None:
    recorder, threads = Recorder(), TokenizerPool(1, leave_seconds=0.01)
    tasks = await begin(threads, recorder, "a", "b")
    await threads.close()
    with pytest.raises(Unavailable, match="stopping"):
        await tasks[1]
    with pytest.raises(Unavailable, match="stopping"):
        await threads.run(len, "")
    assert not tasks[0].done()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("text-"))
    recorder.allow(1)
    with pytest.raises(Unavailable, match="stopping"):
        await tasks[0]
    assert recorder.turns == ["a"]


class ListingEncoder:
    """A text's encoder that lists all of its pieces."""

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def push(self, text: str) -> None:
        self._calls.append(len(text))

    def finish(self) -> None:
        self._calls.append("end")


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([0], [0, "end", "step"]),
        ([3, 0, 4], [3, "end", 0, "end", 4, "end", "step"]),
        ([STEP_CHARACTERS], [STEP_CHARACTERS, "end", "step"]),
        ([STEP_CHARACTERS - 1, 3], [STEP_CHARACTERS - 1, "end", 1, "step", 2, "end", "step"]),
        ([STEP_CHARACTERS, 0], [STEP_CHARACTERS, "end", "step", 0, "end", "step"]),
        ([5, 2 * STEP_CHARACTERS], [5, "end", STEP_CHARACTERS - 5, "step", STEP_CHARACTERS, "step", 5, "end", "step"]),
    ],
)
async def test_short_texts_share_a_step(threads: TokenizerPool, lengths: list[int], expected: list[object]) -> None:
    output: list[object] = []
    await threads.encode_all(
        [(ListingEncoder(output), "x" * length) for length in lengths], lambda: output.append("step")
    )
    assert output == expected


async def test_long_call_does_not_delay_steps(threads: TokenizerPool) -> None:
    gate, order = threading.Event(), list[int]()

    def wait(number: int) -> None:
        assert gate.wait(30)
        order.append(number)

    long = [asyncio.create_task(threads.run_long(5, wait, number)) for number in range(3)]
    await asyncio.sleep(0)
    assert await threads.run(lambda: 7) == 7
    long[1].cancel()
    await asyncio.wait([long[1]])
    gate.set()
    await asyncio.gather(long[0], long[2])
    assert order == [0, 2], "one after the other, and none for a cancelled caller"


async def test_short_text_does_not_wait_for_a_slow_long_one(threads: TokenizerPool) -> None:
    gate = threading.Event()
    long = asyncio.create_task(threads.run_long(STEP_CHARACTERS + 1, gate.wait, 30))
    await asyncio.sleep(0)
    assert await threads.run_long(STEP_CHARACTERS, lambda: 7) == 7
    assert not long.done()
    gate.set()
    assert await long


async def test_no_long_text_starts_after_close(threads: TokenizerPool) -> None:
    assert await threads.run_long(5, lambda: 7) == 7
    await threads.close()
    with pytest.raises(Unavailable):
        await threads.run_long(5, lambda: 7)
