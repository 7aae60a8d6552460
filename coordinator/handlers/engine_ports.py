"""The engine's interface for prompts."""

from collections.abc import AsyncIterator
from typing import Protocol

from coordinator import engine_messages
from coordinator.handlers.size_limits import Capacity


class EventStream(Protocol):
    """The events of one request. Raises RankLost when the last rank is lost."""

    def __aiter__(self) -> AsyncIterator[engine_messages.Event]: ...

    async def aclose(self) -> None:
        """Ends the request. Returns immediately if it has ended."""
        ...

    def cancel_sample(self, sample: int) -> None:
        """Ends one sample; no Ended follows. Idempotent."""
        ...


class GenerationEngine(Capacity, Protocol):
    """The engine's interface for generations."""

    @property
    def exactness_note(self) -> str:
        """Why answers differ from those of the unmodified model; empty if they do not."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens per answer and step."""
        ...

    def answer_room(self, context: str | None, num_tokens: int, num_samples: int, *, is_whole: bool = True) -> int:
        """Most tokens per answer after a prompt of `num_tokens`, if all answers reach that length. `is_whole`: see
        Prompt. Raises NotFound."""
        ...

    def scaling_note(self, context: str | None, num_tokens: int, max_tokens: int, *, is_whole: bool = True) -> str:
        """Why an answer of up to `max_tokens` after a prompt of `num_tokens` differs from that of transformers because
        of position scaling; empty if it does not. `is_whole`: see Prompt. Raises NotFound."""
        ...

    def attribution_context(self, context_id: str) -> engine_messages.AttributionContext:
        """State of a context for attribution. Raises NotFound."""
        ...

    def submit(self, prompt: engine_messages.Prompt) -> EventStream:
        """Raises InvalidArgument, NotFound, ResourceExhausted or Unavailable."""
        ...
