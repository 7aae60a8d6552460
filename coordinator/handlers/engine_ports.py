"""The interface of the engine that the handlers use, which do not depend on its implementation."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from coordinator.auth.tenant_usage import Room, TenantUsage
from coordinator.change_feed import ChangeCounter
from coordinator.engine_messages import AttributionContext, DocumentPart, DocumentPrompt, Event, Prompt
from longleaf.types import Context, ContextSettings, RecomputeResult


class EventStream(Protocol):
    """The events of one request. Raises RankLost when the last rank is lost."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def aclose(self) -> None:
        """Ends the request. Returns immediately if it has ended."""
        ...

    def cancel_sample(self, sample: int) -> None:
        """Ends one sample; no Ended follows. Idempotent."""
        ...


class ServedEngine(Protocol):
    """Contexts and generations."""

    @property
    def max_positions(self) -> int:
        """Most tokens of a context with this model."""
        ...

    @property
    def limit_name(self) -> str:
        """Name of the setting that limits `max_positions`."""
        ...

    @property
    def total_tokens(self) -> int:
        """Total tokens in the pools of all ranks."""
        ...

    def num_tokens(self, context_id: str) -> int:
        """Tokens of a context. Raises NotFound."""
        ...

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

    def attribution_context(self, context_id: str) -> AttributionContext:
        """State of a context for attribution. Raises NotFound."""
        ...

    def submit(self, prompt: Prompt) -> EventStream:
        """Raises InvalidArgument, NotFound, ResourceExhausted or Unavailable."""
        ...

    def check_capacity(self, declared: int) -> None:
        """Raises InvalidArgument if the engine creates no context with this many positions."""
        ...

    def get_context(self, context_id: str) -> Context:
        """Raises NotFound."""
        ...

    def last_upload_id(self, context_id: str) -> str:
        """The upload id of the context's last document; empty if it had none. Raises NotFound."""
        ...

    def ingest(self, document: DocumentPrompt) -> EventStream:
        """Raises AlreadyExists, NotFound, InvalidArgument, ResourceExhausted, DeadlineExceeded or Unavailable."""
        ...

    def list_contexts(self, after: str = "", limit: int | None = None, *, tenant: str) -> list[Context]:
        """Contexts of a tenant, ordered by id, after the id `after`, at most `limit`."""
        ...

    async def fork_context(self, source: str, context_id: str, num_tokens: int | None = None) -> Context:
        """Raises NotFound, AlreadyExists, InvalidArgument, Unavailable or StorageUnavailable."""
        ...

    async def update_context(self, context_id: str, settings: ContextSettings) -> Context:
        """Raises NotFound, InvalidArgument or StorageUnavailable."""
        ...

    async def delete_context(self, context_id: str) -> None:
        """Raises NotFound or StorageUnavailable."""
        ...

    async def recompute_context(self, context_id: str, vocabulary_size: int, room: Room) -> Context:
        """Raises NotFound, AlreadyExists, CheckpointChanged, DataLoss, StorageUnavailable, and the errors of `room`."""
        ...

    async def recompute_contexts(self, vocabulary_size: int, tenant: str, room: Room) -> RecomputeResult: ...

    def text_parts(self, context_id: str) -> Sequence[DocumentPart]:
        """Raises NotFound, ContextLost, CheckpointChanged or Unavailable."""
        ...

    def usage(self, tenant: str) -> TenantUsage:
        """Current usage of a tenant, except for storage."""
        ...

    def storage_bytes(self, tenant: str) -> int:
        """Bytes on storage of a tenant's contexts."""
        ...

    @property
    def changes(self) -> ChangeCounter:
        """Counts changes of requests and of data on ranks."""
        ...
