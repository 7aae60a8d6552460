"""Replays the journal of a generation."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.engine_messages import Admitted, Ended, EndReason, Prompt, Tokens
from coordinator.handlers.response_assembler import ResponseAssembler
from coordinator.persistence.journal.entries import JournalEvent
from longleaf.types import Event


class ReplayedState(NamedTuple):
    """`events` are those for clients, including end events that the journal lacks. `generated` holds the token ids of
    each sample that has not ended."""

    events: list[Event]
    generated: dict[int, Sequence[int]]


def replay_journal(events: Sequence[JournalEvent], prompt: Prompt, answer: ResponseAssembler) -> ReplayedState:
    """Feeds the journaled events to the new assembler `answer`. Clients get the same events as before, with the same
    boundaries; only times differ."""
    past_events: list[Event] = []
    generated = {sample: array("I") for sample in range(prompt.num_samples)}
    for event in events:
        past_events += answer.assemble(event)
        if isinstance(event, Tokens):
            generated[event.sample].extend(event.token_ids)
    for sample, token_ids in generated.items():
        reason = prompt.end_reason(token_ids[-1], len(token_ids)) if token_ids else None
        if reason is not None:  # the process may have died between the last token and the end
            past_events += answer.assemble(_ended(events, sample, reason, len(token_ids)))
    return ReplayedState(past_events, {sample: generated[sample] for sample in answer.open_samples})


def _ended(events: Sequence[JournalEvent], sample: int, reason: EndReason, num_generated: int) -> Ended:
    """An end event with all times 0, because they are unknown."""
    admitted = next((event for event in reversed(events) if isinstance(event, Admitted)), Admitted(0, 0))
    return Ended(
        reason=reason,
        prompt_tokens=admitted.prompt_tokens,
        cached_tokens=admitted.cached_tokens,
        completion_tokens=num_generated,
        queue_seconds=0.0,
        first_token_seconds=0.0,
        decode_seconds=0.0,
        sample=sample,
    )
