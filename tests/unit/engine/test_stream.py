"""The events that a reader gets for a request that waits for a recovery."""

import pytest
from msgspec import structs

from coordinator.engine.stream import MAX_UNREAD, Stream
from coordinator.engine.stream_registry import StreamRegistry
from coordinator.engine_messages import Admitted, Ended, Event, Tokens
from longleaf.errors import Unavailable
from longleaf.types import Progress, Recovering
from tests.support.service import tokens

LOST = [Recovering(8, done, 64) for done in (0, 32, 64)]
ENDED = Ended("length", 5, 3, 2, 0.5, 1.5, 2.0)


def stream() -> Stream:
    return Stream(lambda: None, lambda _: None, lambda: None)


async def read(*put: Event) -> list[Event]:
    """The events that are read if all were queued before."""
    made = stream()
    for event in put:
        made.put(event)
    made.close()
    return [event async for event in made]


async def test_last_recovery_event_follows_the_previous_tokens() -> None:
    first = Tokens(0, tokens((1, 2)))
    assert await read(Admitted(5, 3), first, *LOST) == [Admitted(5, 3), first, LOST[-1]]


@pytest.mark.parametrize("event", [Admitted(5, 3), Progress(5, 5), Tokens(2, tokens((3,))), ENDED])
async def test_recovery_event_is_dropped_when_the_request_continues(event: Event) -> None:
    assert await read(LOST[0], event) == [event]


async def test_queue_position_does_not_end_the_recovery() -> None:
    assert await read(LOST[0], Admitted(5, 3, 2)) == [Admitted(5, 3, 2), LOST[0]]


async def test_token_indices_continue_across_recovery_events() -> None:
    made = stream()
    output = [Tokens(0, tokens((1, 2))), LOST[0], LOST[1], Tokens(2, tokens((3,)))]
    for event in output:
        made.put(event)
        assert await anext(made) == event


async def test_draft_counts_are_joined_with_their_tokens_and_reported_once() -> None:
    output = [Tokens(0, tokens((1, 2, 3)), 0, (), 7, 2), Tokens(3, tokens((4,)), 0, (), 5, 0), Tokens(4, tokens((5,)))]
    assert await read(*output) == [Tokens(0, tokens((1, 2, 3, 4, 5)), 0, (), 12, 2, (3, 4))]
    made = stream()
    for event in output:
        made.put(event)
        assert await anext(made) is event


async def test_events_of_several_samples_keep_their_order_and_join_within_a_sample() -> None:
    end = structs.replace(ENDED, sample=1)
    output = [Tokens(4, tokens((1,)), 1), Tokens(7, tokens((2,))), Tokens(5, tokens((3,)), 1), end, ENDED]
    joined = Tokens(4, tokens((1, 3)), 1, (), 0, 0, (1,))
    assert await read(*output) == [joined, output[1], end, ENDED]


async def test_tokens_count_individually_until_the_reader_is_behind() -> None:
    made, size = stream(), 30
    for start in range(0, MAX_UNREAD, size):
        assert not made.is_full
        made.put(Tokens(start, tokens(range(size)), 0, (), size, size - 1))
    assert made.is_full
    found = await anext(made)
    assert isinstance(found, Tokens) and len(found.tokens) >= MAX_UNREAD
    assert not made.is_full


async def test_recovery_event_reaches_only_its_reader_and_pauses_none() -> None:
    readers, others = StreamRegistry(lambda: 0.0), stream()
    made = stream()
    readers.add(5, made, 1)
    readers.add(6, others, 1)
    assert readers.publish([(5, LOST[0]), (7, LOST[1])]) == []
    assert await anext(made) == LOST[0]
    readers.close_all(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await anext(others)


async def test_error_follows_the_recovery_event() -> None:
    made = stream()
    made.put(LOST[0])
    made.close(Unavailable("gone"))
    assert await anext(made) == LOST[0]
    with pytest.raises(Unavailable, match="gone"):
        await anext(made)
