"""The engine: the loop that turns submitted requests into steps and the results of steps into streams."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from coordinator.auth.tenant_usage import Room, TenantUsage, unlimited_room
from coordinator.change_feed import ChangeCounter
from coordinator.cluster.ports import Ranks
from coordinator.engine.context_transfer import ContextTransfer
from coordinator.engine.inflight_steps import InflightSteps, StepCompletion
from coordinator.engine.stream import Stream
from coordinator.engine.stream_registry import StreamRegistry
from coordinator.engine.views import count_scheduled, has_state_pool, view_cluster, view_context
from coordinator.engine_messages import (
    AttributionContext,
    DocumentPart,
    DocumentPrompt,
    Outcome,
    Prompt,
    Sealed,
)
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.positions import Positions, RopeSwitch
from coordinator.persistence.context_store import ContextStore
from coordinator.persistence.open import PersistentState
from coordinator.recovery.epochs import FIRST_EPOCH, Epochs
from coordinator.recovery.recovery_status import RecoveryStatus
from coordinator.scheduling.limits import num_fed
from coordinator.scheduling.scheduler import Scheduler
from coordinator.telemetry.counters import Counts
from longleaf import types
from longleaf.config import MAX_SECONDS, EngineConfig
from longleaf.errors import GroupFailed, LongleafError, NotFound, RankLost, Unavailable
from longleaf.positions import Rotary
from longleaf.rank_protocol.group_messages import Ready
from longleaf.rank_protocol.step import StepPlan, StepResult
from longleaf.tenants import DEFAULT_TENANT
from longleaf.types import Cluster, ContextSettings, ModelInfo, Recovering, SkippedContext, expired

Observer = Callable[[StepPlan, StepResult], None]
"""Receives each step with its result, in order, while the ranks work on the next one. It must be fast, and must not
raise.
"""
ANY_MODEL = ModelInfo(name="")
ANSWER_PART = 8
"""The divisor of the default answer length: all answers of a request without a limit get at most 1/8 of the pools of
all ranks, so that other requests do not have to wait.
"""
log = logging.getLogger(__name__)
STOPPING = "the service is stopping"
MIN_OPENING = 4
"""Minimum number of tokens at the start of a context that are no source of an answer. Models use them as attention
sinks (Xiao et al. 2024, arXiv 2309.17453)."""


def unobserved(*_: object) -> None:
    """An Observer that ignores the steps."""


class Engine:
    """Contexts and generations over one fleet of ranks. Not thread-safe: one event loop owns it. Calls of clients raise
    Unavailable while the engine cannot answer.

    `clock` measures durations. `wall_clock` supplies the timestamps of contexts, in seconds since the Unix epoch.
    """

    def __init__(
        self,
        ranks: Ranks,
        config: EngineConfig,
        max_positions: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        observe: Observer = unobserved,
        durability: PersistentState | None = None,
    ) -> None:
        """Without `durability`, contexts are lost when the service stops."""
        self._ranks = ranks
        self._config = config
        self.positions = Positions(Rotary(), max_positions, allow_long=config.allow_long)
        """The limit on positions, and their rotation, which is known once the ranks are ready."""
        self._notes: tuple[str, ...] = ()
        """By rank of the first epoch, the reason why it could not compare the model with plain attention, or empty."""
        self._dequantization = ""
        self._clock = clock
        self._wall_clock = wall_clock
        self._observe = observe
        self._work_available = asyncio.Event()
        self._store = ContextStore(durability, ranks, self._delete, wall_clock, self._work_available.set)
        self._recoveries = RecoveryStatus(clock, self._store.changed)
        self._epochs = Epochs(ranks, self._recoveries, clock, self._store.note_epoch, self._work_available.set)
        self.transfers = ContextTransfer(self, self._store, Path(config.model))
        """Export and import of contexts."""
        self._scheduler: Scheduler | None = None
        self._failure: LongleafError | None = Unavailable("the service is starting")
        self._readers = StreamRegistry(clock)
        self._next_id = 0
        self._steps = InflightSteps(self._work_available.set, clock)
        self._counts = Counts()
        self._loop_task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.changes = ChangeCounter()
        """Incremented whenever the result of `cluster` may have changed."""

    @property
    def max_positions(self) -> int:
        """The maximum number of tokens of context, input and answer together."""
        return self.positions.limit

    @property
    def limit_name(self) -> str:
        """The setting that determines `max_positions`."""
        return self.positions.limit_name

    def check_capacity(self, declared: int) -> None:
        """Raises InvalidArgument when a context cannot have this capacity."""
        self.positions.check_capacity(declared)

    @property
    def max_draft_tokens(self) -> int:
        return self._config.max_draft_tokens

    @property
    def exactness_note(self) -> str:
        """Reasons why answers may differ from those of the unmodified model; empty if there are none. Until the ranks
        are ready, only the settings are considered."""
        return "; ".join(dict.fromkeys(note for note in (self._config.exactness_note, *self._notes) if note))

    @property
    def dequantization(self) -> str:
        """The stored layout and the computed type of quantized weights; empty if they are not quantized, and until the
        ranks are ready."""
        return self._dequantization

    @property
    def total_tokens(self) -> int:
        """Tokens that the pools of all ranks can hold."""
        return self._epochs.current.num_tokens if self._epochs.is_begun else 0

    async def start(self) -> tuple[Ready, ...]:
        """Wait until the ranks are ready. Raises StartError, ModelRefused or RankLost."""
        first = FIRST_EPOCH + self._store.last_epoch
        epoch = await self._epochs.start(self._config.block_size, first)
        readies = epoch.formation.readies
        self._notes = tuple(ready.exactness_note for ready in readies)
        self._dequantization = readies[0].dequantization
        self.positions = self.positions.from_report(readies[0].rotary)
        self._scheduler = Scheduler(
            self._config,
            epoch.placer,
            self.positions,
            epoch.number,
            epoch.max_moved_blocks,
            is_durable=self._store.is_durable,
            is_stored=self._store.is_stored,
        )
        await self._store.load(self._scheduler, self._epochs, self._config.block_size)
        self._failure = None
        return readies

    def preload(self) -> None:
        """Reload stored contexts before the first request, the most recently used first, as far as the pools have
        space.
        """
        self._current().preload()
        self._work_available.set()

    # --- calls of clients ---

    def submit(self, prompt: Prompt) -> Stream:
        """Start a generation. Its stream ends when all samples have ended.

        Raises InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded or Unavailable.
        """
        return self._admit(prompt, prompt.num_samples, prompt.num_open)

    def ingest(self, document: DocumentPrompt) -> Stream:
        """Ingest a document into a new context, or append it to an existing one. The stream yields Progress, and ends
        once the context is acknowledged.

        Raises AlreadyExists, NotFound, InvalidArgument, ResourceExhausted, DeadlineExceeded or Unavailable.
        """
        return self._admit(document)

    def _admit(self, prompt: Prompt | DocumentPrompt, num_samples: int = 1, num_open: int = 1) -> Stream:
        with self._recoveries.explaining():
            self._open().admit(self._next_id, prompt, self._clock())
        if isinstance(prompt, DocumentPrompt):
            self._recoveries.forget(prompt.context)
        elif not prompt.is_probe:  # a probe belongs to an answer that has been counted
            self._store.record_use(prompt.context)
        request_id, self._next_id = self._next_id, self._next_id + num_samples
        stream = Stream(
            lambda: self._cancel(request_id),
            lambda sample: self._cancel_sample(request_id, sample),
            lambda: self._pause(request_id, False),
        )
        self._readers.add(request_id, stream, num_open)
        if self._epochs.missing_weights:
            stream.put(Recovering(0, 0, 0, self._epochs.missing_weights))
        self._work_available.set()
        return stream

    def _delete(self, scheduler: Scheduler, context_id: str) -> None:
        for request_id in scheduler.delete_context(context_id):
            self._readers.close(request_id, NotFound(f"contexts/{context_id}"))
        self._work_available.set()

    def _expire(self, scheduler: Scheduler) -> float | None:
        """Delete the expired contexts and end the ingests into them. Returns the seconds until the next expiry, None if
        there is none.
        """
        now = self._wall_clock()
        for context_id in scheduler.contexts.expired(now):
            self._delete(scheduler, context_id)
            self._store.expire(context_id)
        for request_id in scheduler.expire_ingests(now):
            self._readers.close(request_id, expired())
            self._work_available.set()
        following = scheduler.next_expiry
        return None if following is None else following - now

    def cluster(self, model: ModelInfo = ANY_MODEL, launcher: str = "") -> Cluster:
        """Return the live ranks and the load. `model` and `launcher` are copied into the result."""
        scheduler, losses, latest = self._open(), self._ranks.losses, self._recoveries.latest
        found = view_cluster(scheduler, self._config, self._epochs.current, losses, self.exactness_note)
        return replace(
            found,
            model=model,
            launcher=launcher,
            dequantization=self._dequantization,
            recovery=latest,
            storage=self._store.view(),
            missing_weights=self._epochs.missing_weights,
        )

    @property
    def counts(self) -> Counts:
        """The totals so far; also available after the engine has ended."""
        counts, scheduler = self._counts, self._scheduler
        if scheduler is not None:
            count_scheduled(scheduler, counts)
        counts.snapshot_bytes = self._store.num_snapshot_bytes
        return counts

    def audit(self) -> None:
        """Check the invariants of the scheduler, and that every open stream belongs to a request."""
        scheduler = self._open()
        scheduler.audit()
        assert len(self._readers) == scheduler.num_waiting + scheduler.num_running

    def _open(self) -> Scheduler:
        """Return the scheduler for a call of a client. Raises Unavailable with the failure as its reason; RankLost
        itself is raised only on streams that the loss of a rank interrupted.
        """
        if self._failure is not None:
            raise Unavailable(str(self._failure)) from self._failure
        return self._current()

    def _current(self) -> Scheduler:
        """Return the scheduler, after the deletion of expired contexts. Raises the failure that stopped the engine."""
        if self._failure is not None:
            raise self._failure
        assert self._scheduler is not None
        self._expire(self._scheduler)
        return self._scheduler

    def _view(self, context: NamedContext) -> types.Context:
        assert self._scheduler is not None
        placements, readies = self._scheduler.segments.placements, self._readies()
        stored = self._store.num_bytes(context)
        found = view_context(context, placements, readies, self.positions, self.exactness_note, stored)
        return replace(found, dequantization=self._dequantization)

    def _readies(self) -> Sequence[Ready]:
        return self._epochs.current.formation.readies

    def _cancel(self, request_id: int) -> None:
        self._readers.remove(request_id)
        if self._scheduler is not None:
            self._scheduler.cancel(request_id)
        self._work_available.set()

    def _cancel_sample(self, request_id: int, sample: int) -> None:
        if self._scheduler is not None and self._scheduler.cancel_sample(request_id, sample):
            self._readers.end_sample(request_id)
        self._work_available.set()

    def _pause(self, request_id: int, is_paused: bool) -> None:
        if self._scheduler is not None:
            self._scheduler.pause(request_id, is_paused)
        self._work_available.set()

    # --- contexts ---

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
        text = path.segments[0].text
        return AttributionContext(
            segments=path.ids,
            ends=tuple(end for _, _, end in path.parts()),
            num_opening=min(path.end, max(MIN_OPENING, text.num_lead if text is not None else 0)),
            owner=path.segments[-1],
            block_size=self._config.block_size,
            full_layers=readies[0].full_layers,
            has_states=has_state_pool(readies[0]),
        )

    def last_upload_id(self, context_id: str) -> str:
        """Return the client's upload id of the last document of a context. Raises NotFound."""
        return self.named(context_id).record.upload_id

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
        return self._store.total_bytes(self._open().contexts.totals(tenant))

    async def fork_context(self, source: str, context_id: str, num_tokens: int | None = None) -> types.Context:
        """Create a context of the first `num_tokens` tokens of another, by default all. Copies nothing.

        Raises NotFound, AlreadyExists, InvalidArgument naming token_count, Unavailable or StorageUnavailable.
        """
        self._open()
        with self._recoveries.explaining():
            forked = await self._store.fork(source, context_id, num_tokens)
        return self.on_context_added(forked)

    def place_before(self, context_id: str, position: int) -> int:
        """The last position of a context, not after `position`, at which it can be forked; 0 if there is none. Raises
        NotFound.
        """
        self.named(context_id)
        return self._open().contexts.place_before(context_id, position)

    async def recompute_context(
        self, context_id: str, vocabulary_size: int, room: Room = unlimited_room
    ) -> types.Context:
        """Adopt the context of that name that an earlier checkpoint has read. It starts evicted and is recomputed by
        this checkpoint, whose vocabulary has `vocabulary_size` tokens.

        Raises NotFound, AlreadyExists, CheckpointChanged, DataLoss, StorageUnavailable, and the errors of `room`.
        """
        self._open()
        with self._recoveries.explaining():
            context = await self._store.adopt_stale(context_id, self.positions, vocabulary_size, room)
        return self.on_context_added(context)

    async def recompute_contexts(
        self, vocabulary_size: int, tenant: str = DEFAULT_TENANT, room: Room = unlimited_room
    ) -> types.RecomputeResult:
        """Adopt all contexts of a tenant that earlier checkpoints have read."""
        self._open()
        adopted, refused = await self._store.adopt_all_stale(self.positions, vocabulary_size, tenant, room)
        skipped = tuple(SkippedContext(name, str(error)) for name, error in refused.items())
        return types.RecomputeResult(contexts=tuple(map(self.on_context_added, adopted)), skipped=skipped)

    async def update_context(self, context_id: str, settings: ContextSettings) -> types.Context:
        """Raises NotFound, InvalidArgument for an expiry time in the past, and StorageUnavailable."""
        self._open()
        settings.check(self._wall_clock(), "context")
        return self._view(await self._store.update(context_id, settings))

    async def delete_context(self, context_id: str) -> None:
        """Raises NotFound and StorageUnavailable. Running generations on the context continue; an ingest into it fails
        with NotFound.
        """
        self._open()
        await self._store.delete(context_id)

    # --- the loop ---

    async def run(self) -> None:
        """Run steps, across epochs, until `close`. When no rank is left to continue, every stream fails with RankLost,
        which is also raised here.
        """
        scheduler = self._current()
        self._loop_task = asyncio.current_task()
        self._epochs.watch()
        try:
            while not self._is_closing:
                self._run_once(scheduler)
                if self._epochs.is_over or (self._epochs.may_grow and not self._steps):
                    await self._steps.abandon()
                    await self._epochs.form_next(scheduler, lambda: self._publish_change(scheduler))
                else:
                    await self._wait(scheduler)
        except asyncio.CancelledError:
            self._fail(Unavailable(STOPPING))
            if not self._is_closing:
                raise
        except LongleafError as error:
            self._fail(error)
            raise
        except Exception as error:
            self._fail(Unavailable(f"the engine failed: {error!r}"))
            raise
        finally:
            self._epochs.unwatch()
            await self._steps.abandon()

    def _run_once(self, scheduler: Scheduler) -> None:
        """Commit the available results and send the next plans; then do the less urgent work: notify the readers, count
        and measure. Raises the failure that stopped the engine.
        """
        if self._failure is not None:
            raise self._failure
        outcomes, answers = list[Outcome](), list[StepCompletion]()
        self._work_available.clear()
        with suppress(RankLost, GroupFailed):  # the epoch has ended, or is about to
            while (answer := self._steps.pop_completed()) is not None:
                outcomes += scheduler.commit(answer.plan, answer.result, self._wall_clock())
                answers.append(answer)
        self._epochs.shrink_to_fit(scheduler)
        while not self._epochs.may_grow and (plan := scheduler.schedule(self._clock())) is not None:
            self._steps.send(self._epochs.current.formation.group, plan)
        self._publish(scheduler, outcomes)
        for plan, result, gap in answers:
            self._counts.add_step(plan.kind, result.seconds, result.merge_bytes)
            self._observe(plan, result)
            if gap is not None:
                scheduler.measure_gap(*gap)
        scheduler.learn()

    def _publish(self, scheduler: Scheduler, outcomes: Sequence[Outcome] = ()) -> None:
        """Publish outcomes, recovery progress and faults."""
        for fault in scheduler.pop_faults():
            log.error("unexpected error; only the request that caused it ends", exc_info=fault)
        events = [*outcomes, *scheduler.pop_outcomes()]
        for _, outcome in events:
            if isinstance(outcome, Sealed):
                self._store.seal(outcome.job)
        for request_id in self._readers.publish(events):
            self._pause(request_id, True)
        if scheduler.num_waiting:
            self._readers.publish_positions(scheduler.positions)
        self._recoveries.update(scheduler.recovery.total, scheduler.job_recovery.pop_dropped())
        try:
            self._store.run_pending()
        except Exception as error:  # lost data is recomputed, or waits for the next turn
            log.error("storage check failed: unexpected error", exc_info=error)

    def _publish_change(self, scheduler: Scheduler) -> None:
        """Publish the outcomes of a change of ranks, and the cluster."""
        self._publish(scheduler)
        self.changes.record()

    async def _wait(self, scheduler: Scheduler) -> None:
        """Wait for work, at most until the deadline of a request or the expiry of a context."""
        deadline, expiry = scheduler.next_deadline, self._expire(scheduler)
        waits = [MAX_SECONDS] + ([] if deadline is None else [deadline - self._clock()])
        waits += [] if expiry is None else [expiry]
        timer = asyncio.get_running_loop().call_later(max(0.0, min(waits)), self._work_available.set)
        self.changes.record()  # every change, by clients, steps or time, leads here
        await self._work_available.wait()
        timer.cancel()

    def _fail(self, error: LongleafError) -> None:
        """End every stream with `error` and refuse later calls."""
        self._failure = error
        self._readers.close_all(error)
        self.changes.close()

    def end_streams(self, reason: str = STOPPING) -> None:
        """End every stream with Unavailable and `reason`, or with the failure that stopped the engine before, and
        refuse later calls.
        """
        self._fail(self._failure or Unavailable(reason))

    async def close(self) -> None:
        """End every stream and order the ranks to exit."""
        self._is_closing = True
        self.end_streams()
        if self._loop_task is not None and self._loop_task is not asyncio.current_task():
            self._loop_task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.wait([self._loop_task])
        await self._store.close()
        await self._ranks.close()
