"""Limits of uploads of files: open uploads, spooled bytes, turns of the extraction. Callers with less come first."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.contexts import upload_slots
from gateway.contexts.upload_slots import UploadSlot, UploadSlots
from gateway.errors import HttpProblem
from longleaf.documents.limits import ExtractionLimits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_slots, "MAX_SPOOLED_BYTES", 100)
    monkeypatch.setattr(upload_slots, "MAX_UPLOADS", 8)


def slots_of(stack: ExitStack, slots: UploadSlots, callers: str, num_bytes: int = 0) -> list[UploadSlot]:
    """A slot for each caller, which is the credential and the address."""
    found = list[UploadSlot]()
    for caller, address in callers.split():
        found.append(stack.enter_context(slots.slot(caller, address)))
        found[-1].grow(num_bytes)
    return found


async def wait(slot: UploadSlot) -> str:
    """The result of a wait for a part of the body that does not arrive."""
    try:
        with slot.waiting_until(None) as timeout:
            async with timeout:
                await asyncio.Event().wait()
    except HttpProblem as problem:
        return problem.message
    return ""


async def started(*tasks: asyncio.Task[None]) -> list[bool]:
    """Whether the tasks have ended, after all callbacks."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_body_and_uploads_of_a_caller_are_limited() -> None:
    slots = UploadSlots(ExtractionLimits(file_bytes=10))
    with ExitStack() as stack:
        *_, last = slots_of(stack, slots, "aA aA aA aB", 10)
        with pytest.raises(HttpProblem, match="the body has more than 10 bytes"):
            last.grow(1)
        with pytest.raises(HttpProblem, match="4 uploads of files are running"):
            slots_of(stack, slots, "aC")
        slots_of(stack, slots, "bA")
    slots.audit()


async def test_largest_address_and_caller_is_evicted_when_the_disk_is_full() -> None:
    slots = UploadSlots()
    with ExitStack() as stack:
        small_upload, large = slots_of(stack, slots, "aA", 10) + slots_of(stack, slots, "bB", 40)
        first, second = slots_of(stack, slots, "cB dB", 20)
        idle = asyncio.create_task(wait(large))
        await started()
        (victim,) = slots_of(stack, slots, "eE", 30)  # another address has 80 bytes, 40 of them those of one caller
        assert "receiving as many" in await idle
        with pytest.raises(HttpProblem, match="receiving as many"):
            large.grow(1)
        with pytest.raises(HttpProblem, match="receiving as many"):
            victim.grow(30)  # it would have most
        for each in (small_upload, first, second):
            each.grow(1)
    slots.audit()


async def test_callers_of_one_address_evict_each_other() -> None:
    """As behind a reverse proxy."""
    slots = UploadSlots()
    with ExitStack() as stack:
        slots_of(stack, slots, "aA aA bA", 33)
        (newest,) = slots_of(stack, slots, "cA", 30)
        newest.grow(1)
        with pytest.raises(HttpProblem, match="receiving as many"):
            newest.grow(50)
    slots.audit()


@pytest.mark.parametrize("stalled", ["aA aA aA aA bB bB bB bB", "aA bA cA dA eA fB gB hB"])
async def test_idle_bodies_hold_no_slot(stalled: str) -> None:
    """A caller without uploads is served, however many idle ones there are, and with however many credentials."""
    slots = UploadSlots()
    with ExitStack() as stack:
        idle = [asyncio.create_task(wait(each)) for each in slots_of(stack, slots, stalled, 10)]
        await started()
        (slot,) = slots_of(stack, slots, "zZ", 10)
        await slot.wait_turn()
        assert sum(await started(*idle)) == 1
        for each in idle:
            each.cancel()
        await asyncio.wait(idle)
    slots.audit()


async def test_each_caller_has_one_process_and_the_caller_with_fewest_texts_is_next() -> None:
    slots = UploadSlots()
    with ExitStack() as stack:
        all_slots = slots_of(stack, slots, "aA aA aA bB bB cC")
        tasks = [asyncio.create_task(each.wait_turn()) for each in all_slots]
        assert await started(*tasks) == [True, False, False, True, False, False]
        all_slots[0].end_extraction()
        assert await started(*tasks) == [True, False, False, True, False, True], "c has no text, a has one"
        all_slots[5].end_extraction()
        assert await started(*tasks) == [True, True, False, True, False, True]
        all_slots[1].end_extraction()
        assert not tasks[2].done(), "a has two texts that were not sent"
        all_slots[0].release()
        assert await started(*tasks) == [True, True, True, True, False, True]
        all_slots[3].end_extraction()
        assert await started(*tasks) == [True] * 6
    slots.audit()


async def test_one_address_never_has_all_texts() -> None:
    """Even with a credential for each upload, which a service without credentials accepts."""
    slots = UploadSlots()
    with ExitStack() as stack:
        for each in slots_of(stack, slots, "aA bA cA dA eA fA"):
            await each.wait_turn()
            each.end_extraction()
        same, other = slots_of(stack, slots, "gA hB")
        waiting = asyncio.create_task(same.wait_turn())
        await other.wait_turn()
        assert await started(waiting) == [False]
        waiting.cancel()
        await asyncio.wait([waiting])
    slots.audit()


async def test_waiting_upload_is_evicted_and_a_running_one_is_not() -> None:
    slots = UploadSlots()
    with ExitStack() as stack:
        running, waiting = slots_of(stack, slots, "aA aA", 40)
        await running.wait_turn()
        turn = asyncio.create_task(waiting.wait_turn())
        await started()
        (other,) = slots_of(stack, slots, "bB", 30)
        with pytest.raises(HttpProblem, match="receiving as many"):
            await turn
        with pytest.raises(HttpProblem, match="receiving as many"):
            other.grow(40)
        running.end_extraction()
        other.grow(40)
    slots.audit()
