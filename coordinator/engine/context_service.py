"""The operations of clients on contexts, except ingests."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from coordinator.auth.tenant_usage import Room, TenantUsage, unlimited_room
from coordinator.engine.checkpoint_migration import CheckpointMigration
from coordinator.engine.context_persistence import ContextPersistence
from coordinator.engine.recovery_status import RecoveryStatus
from coordinator.engine_messages import LAST_IDS, AttributionContext, DocumentPart
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.positions import Positions, RopeSwitch
from coordinator.scheduling.limits import num_fed
from coordinator.scheduling.scheduler import Scheduler
from longleaf import types
from longleaf.config import EngineConfig
from longleaf.rank_protocol.group_messages import Ready
from longleaf.tenants import DEFAULT_TENANT
from longleaf.types import ContextSettings, SkippedContext

ANSWER_PART = 8
"""The divisor of the default answer length: all answers of a request without a limit get at most 1/8 of the pools of
all ranks, so that other requests do not have to wait.
"""


class ContextService(ABC):
    """The part of an engine that manages contexts by name. All methods raise Unavailable while the engine cannot
    answer.
    """

    positions: Positions
    """The limit on positions and their rotation; known once the ranks are ready."""
    _config: EngineConfig
    _persistence: ContextPersistence
    _migration: CheckpointMigration
    _recoveries: RecoveryStatus
    _wall_clock: Callable[[], float]

    @property
    @abstractmethod
    def total_tokens(self) -> int:
        """Tokens that the pools of all ranks can hold."""
        ...

    @abstractmethod
    def _open(self) -> Scheduler:
        """Return the scheduler for a call of a client. Raises Unavailable."""
        ...

    @abstractmethod
    def _readies(self) -> Sequence[Ready]:
        """Return the Ready messages of the ranks of this epoch."""
        ...

    @abstractmethod
    def _view(self, context: NamedContext) -> types.Context: ...

    def num_tokens(self, context_id: str) -> int:
        """Return the number of tokens of a context. Raises NotFound."""
        return self.named(context_id).num_tokens

    def answer_room(self, context: str | None, num_tokens: int, num_samples: int, *, is_whole: bool = True) -> int:
        """Return the maximum tokens of each answer after a prompt of `num_tokens`. `is_whole`: see Prompt. Raises
        NotFound.
        """
        named = self.named(context) if context is not None else None
        num_prompt = (named.num_tokens if named else 0) + num_tokens
        if named is None:
            capacity = self.positions.capacity(num_prompt, None)
        elif is_whole:
            capacity = self.positions.question_capacity(named.rope, named.capacity, num_prompt)
        else:
            capacity = named.capacity
        return min(capacity - num_prompt, self.total_tokens // (ANSWER_PART * num_samples))

    def scaling_note(self, context: str | None, num_tokens: int, max_tokens: int, *, is_whole: bool = True) -> str:
        """Return the reason why the scaling of positions makes an answer of up to `max_tokens` after a prompt of
        `num_tokens` differ from that of transformers; empty if it does not. `is_whole`: see Prompt. Raises NotFound.
        """
        if context is None:
            return self.positions.scaling_note(self.positions.ropes(num_tokens + num_fed(max_tokens)), num_tokens)
        named = self.named(context)
        num_prompt = named.num_tokens + num_tokens
        ropes = RopeSwitch(named.rope, named.rope)
        if is_whole:
            num_positions = num_prompt + num_fed(max_tokens)
            ropes = self.positions.question_ropes(named.rope, named.capacity, num_positions)
        return self.positions.scaling_note(ropes, num_prompt)

    def attribution_context(self, context_id: str) -> AttributionContext:
        """Return the data that attributes answers to the parts of a context. Raises NotFound."""
        path, readies = self.named(context_id).path, self._readies()
        return AttributionContext(
            segments=path.ids,
            ends=tuple(end for _, _, end in path.parts()),
            last_ids=path.token_ids(max(0, path.end - LAST_IDS)),
            block_size=self._config.block_size,
            full_layers=readies[0].full_layers,
            can_cut=readies[0].windows is None,
        )

    def last_upload_id(self, context_id: str) -> str:
        """Return the client's upload id of the last document of a context. Raises NotFound."""
        return self.named(context_id).upload_id

    def named(self, context_id: str) -> NamedContext:
        """Raises NotFound, ContextLost or CheckpointChanged."""
        with self._recoveries.explaining():
            return self._open().contexts.get(context_id)

    def text_parts(self, context_id: str) -> list[DocumentPart]:
        """Return the token ids and the texts of the parts of a context. Raises NotFound, ContextLost or
        CheckpointChanged.
        """
        path = self.named(context_id).path
        return [
            DocumentPart(token_ids=segment.token_ids, num_tokens=end - start, text=segment.text)
            for segment, start, end in path.parts()
        ]

    def get_context(self, context_id: str) -> types.Context:
        """Return a context with its placement on the ranks, which is slower than `num_tokens`. Raises NotFound."""
        return self._view(self.named(context_id))

    def on_context_added(self, context: NamedContext) -> types.Context:
        """Return the view of a new context, and drop the record of an earlier loss of its name."""
        self._recoveries.forget(context.id)
        return self._view(context)

    def list_contexts(
        self, after: str = "", limit: int | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> list[types.Context]:
        """Return at most `limit` contexts of a tenant whose ids sort after `after`, sorted by id."""
        return [self._view(context) for context in self._open().contexts.of_tenant(tenant, after, limit)]

    def usage(self, tenant: str) -> TenantUsage:
        """Return the usage of a tenant, except storage."""
        return self._open().usage(tenant)

    def storage_bytes(self, tenant: str) -> int:
        """Return the stored bytes of the tenant's contexts, on storage and in the catalog."""
        return self._persistence.total_bytes(self._open().contexts.totals(tenant))

    async def fork_context(self, source: str, context_id: str, num_tokens: int | None = None) -> types.Context:
        """Create a context of the first `num_tokens` tokens of another, by default all. Copies nothing.

        Raises NotFound, AlreadyExists, InvalidArgument naming token_count, Unavailable or StorageUnavailable.
        """
        self._open()
        with self._recoveries.explaining():
            forked = await self._persistence.fork(source, context_id, num_tokens)
        return self.on_context_added(forked)

    async def recompute_context(
        self, context_id: str, vocabulary_size: int, room: Room = unlimited_room
    ) -> types.Context:
        """Adopt the context of that name that an earlier checkpoint has read. It starts evicted and is recomputed by
        this checkpoint, whose vocabulary has `vocabulary_size` tokens.

        Raises NotFound, AlreadyExists, CheckpointChanged, DataLoss, StorageUnavailable, and the errors of `room`.
        """
        self._open()
        with self._recoveries.explaining():
            context = await self._migration.adopt(context_id, self.positions, vocabulary_size, room)
        return self.on_context_added(context)

    async def recompute_contexts(
        self, vocabulary_size: int, tenant: str = DEFAULT_TENANT, room: Room = unlimited_room
    ) -> types.RecomputeResult:
        """Adopt all contexts of a tenant that earlier checkpoints have read."""
        self._open()
        adopted, refused = await self._migration.adopt_all(self.positions, vocabulary_size, tenant, room)
        skipped = tuple(SkippedContext(name, str(error)) for name, error in refused.items())
        return types.RecomputeResult(contexts=tuple(map(self.on_context_added, adopted)), skipped=skipped)

    async def update_context(self, context_id: str, settings: ContextSettings) -> types.Context:
        """Raises NotFound, InvalidArgument for an expiry time in the past, and StorageUnavailable."""
        self._open()
        settings.check(self._wall_clock(), "context")
        return self._view(await self._persistence.update(context_id, settings))

    async def delete_context(self, context_id: str) -> None:
        """Raises NotFound and StorageUnavailable. Running generations on the context continue; an ingest into it fails
        with NotFound.
        """
        self._open()
        await self._persistence.delete(context_id)
