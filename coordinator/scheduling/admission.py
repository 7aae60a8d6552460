"""From requests to jobs: what is refused at once, and why."""

from collections.abc import Collection

from msgspec import UNSET

from coordinator.events import Document, Prompt
from coordinator.placement.contexts import Contexts
from coordinator.placement.paths import Path
from coordinator.placement.positions import UNLIMITED
from coordinator.placement.segments import Segments
from coordinator.scheduling.jobs import Ingest, Job, Sequence
from coordinator.scheduling.limits import Limits
from coordinator.scheduling.preemption import Room
from coordinator.scheduling.speeds import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, ResourceExhausted
from longleaf.units import human_seconds


class Admission:
    """Checks requests. Keeps nothing."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        contexts: Contexts,
        segments: Segments,
        room: Room,
        speeds: Speeds,
    ) -> None:
        self._config = config
        self._limits = limits
        self._contexts = contexts
        self._segments = segments
        self._room = room
        self._speeds = speeds

    def sequence(self, job_id: int, prompt: Prompt) -> Sequence:
        """The job of a generation. Raises InvalidArgument or NotFound."""
        prompt.sampling.check()
        if not 1 <= prompt.num_samples <= self._config.max_sequences:
            limit = f"between 1 and {self._config.max_sequences}, the generations that run at once"
            raise InvalidArgument("sample_count", f"{prompt.num_samples} is not {limit}")
        context = self._contexts.get(prompt.context) if prompt.context is not None else None
        if not prompt.token_ids:
            raise InvalidArgument("input", "has no tokens")
        num_tokens, max_tokens = len(prompt.token_ids), prompt.sampling.max_tokens
        path = context.path if context else Path()
        job = Sequence(job_id, path, prompt, self._limits.num_prefill(num_tokens, prompt.num_samples))
        job.capacity = context.capacity if context else UNLIMITED
        job.rope = context.rope if context else self._limits.positions.rope(num_tokens + max_tokens)
        job.is_beyond_trained = job.num_prompt + max_tokens > self._limits.positions.trained
        self._limits.check(job, "input", 1)
        self._limits.check(job, "sampling.max_token_count", max_tokens)
        job.num_blocks = self._limits.check(job, "sample_count", max_tokens, prompt.num_samples)
        return job

    def ingest(self, job_id: int, document: Document, *, is_busy: bool) -> Ingest:
        """The job of a document; `is_busy` when another one is read into the context.

        Raises AlreadyExists, NotFound, InvalidArgument or ResourceExhausted.
        """
        context = document.context
        if not document.append and (is_busy or context in self._contexts):
            raise AlreadyExists(f"contexts/{context}")
        known = self._contexts.get(context) if document.append else None
        if not document.token_ids:
            raise InvalidArgument("text", "has no tokens")
        if is_busy:
            seconds = self._speeds.retry_seconds(1)
            raise ResourceExhausted(f"contexts/{context}", "another document is being appended", seconds)
        job = Ingest(job_id, known.path if known else Path(), document)
        declared = None if document.settings.capacity is UNSET else document.settings.capacity
        num_tokens = len(document.token_ids)
        job.capacity = known.capacity if known else self._limits.positions.capacity(num_tokens, declared)
        job.rope = known.rope if known else self._limits.positions.rope(job.capacity)
        job.num_blocks = self._limits.check(job, "text", 0, num_tails=0)
        return job

    def check(self, job: Job, waiting: Collection[Job], running: Collection[Job], now: float) -> None:
        """Raises ResourceExhausted when there may never be room, DeadlineExceeded when the deadline cannot be met."""
        self._room.check(job, [*waiting, *running])
        if job.claim.deadline is None:
            return
        left = job.claim.deadline - now
        needed = self._speeds.least_seconds(job, self._num_held(job), waiting, running)
        if left <= 0 or needed > left:
            raise DeadlineExceeded(
                f"{human_seconds(max(0.0, left))} are left, and {human_seconds(needed)} are needed at least"
            )

    def _num_held(self, job: Job) -> int:
        """Tokens that need not be read, because an earlier prompt began with them."""
        is_sharing = isinstance(job, Sequence) and job.is_sharing
        return self._segments.match(job.token_ids[:-1], job.rope).end if is_sharing else 0
