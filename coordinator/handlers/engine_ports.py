"""The engine, as those see it who have prompts."""

from collections.abc import AsyncIterator
from typing import Protocol

from coordinator import engine_messages
from coordinator.handlers.size_limits import Capacity


class EventStream(Protocol):
    """One request's events. Raises RankLost when the last rank is lost."""

    def __aiter__(self) -> AsyncIterator[engine_messages.Event]: ...

    async def aclose(self) -> None:
        """Ends the request, and returns at once when it has ended."""
        ...

    def cancel_sample(self, sample: int) -> None:
        """Ends one sample, whose Ended will not come. Idempotent."""
        ...


class GenerationEngine(Capacity, Protocol):
    """The engine, as generations see it."""

    @property
    def exactness_note(self) -> str:
        """Why answers are not what the model alone would say; empty where they are."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that are drafted for an answer in a step."""
        ...

    def answer_room(self, context: str | None, num_tokens: int, num_samples: int, *, is_whole: bool = True) -> int:
        """Tokens that each answer may have after so many of a prompt, if all may be that long. `is_whole`: see Prompt.
        Raises NotFound."""
        ...

    def scaling_note(self, context: str | None, num_tokens: int, max_tokens: int, *, is_whole: bool = True) -> str:
        """Why an answer of up to `max_tokens` after a prompt of `num_tokens` is not that of transformers because of how
        its positions are scaled; empty where it is. `is_whole`: see Prompt. Raises NotFound."""
        ...

    def grounds(self, context_id: str) -> engine_messages.AttributionContext:
        """What can be told of where answers about a context come from. Raises NotFound."""
        ...

    def submit(self, prompt: engine_messages.Prompt) -> EventStream:
        """Raises InvalidArgument, NotFound, ResourceExhausted or Unavailable."""
        ...
