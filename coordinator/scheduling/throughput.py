"""Recent speeds of the ranks, and estimates based on them. Pure: measured times are passed in. Times are in seconds."""

from collections.abc import Collection, Sequence

from coordinator.scheduling.jobs import Job
from coordinator.scheduling.sequences import SequenceJob
from longleaf.rank_protocol.step import Decode, Prefill, Row, StepPlan
from longleaf.runs import ceil_div

DECAY = 0.75
"""Factor by which each measurement reduces the weight of the earlier ones."""
RETRY_SECONDS = (0.5, 60.0)
"""Minimum and maximum retry delay for a caller."""
UNKNOWN_RETRY_SECONDS = 2.0


class Rate:
    """Recent mean of seconds per item; None before the first measurement."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0

    @property
    def value(self) -> float | None:
        return self._seconds / self._count if self._count else None

    def add(self, seconds: float, count: int) -> None:
        self._seconds = self._seconds * DECAY + seconds
        self._count = self._count * DECAY + count


class Speeds:
    """Seconds per prompt token, per decode step without probes, per token that a probe adds to a step, and between the
    ends of two consecutive jobs."""

    def __init__(self) -> None:
        self.prefill_token = Rate()
        self.probe_token = Rate()
        self.decode_step = Rate()
        self.job = Rate()
        self._last_end: float | None = None

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """Records the duration of a step; 0 means that it was not measured."""
        if seconds <= 0:
            return
        if isinstance(plan.work, Prefill):
            self.prefill_token.add(seconds, len(plan.work.token_ids))
        elif isinstance(plan.work, Decode):
            probes = [row for row in plan.work.rows if row.token_index < 0]
            if probes:
                self._measure_probes(probes, seconds, is_shared=len(probes) < len(plan.work.rows))
            else:
                self.decode_step.add(seconds, 1)

    def _measure_probes(self, probes: Sequence[Row], seconds: float, *, is_shared: bool) -> None:
        """`is_shared`: the step had other rows, which take as long as a step without probes."""
        others = (self.decode_step.value or 0.0) if is_shared else 0.0
        if seconds <= others:  # the value is outdated: it was measured with more rows, or with longer contexts
            others = seconds / 2
            self.decode_step.add(others, 1)
        self.probe_token.add(seconds - others, sum(len(row.token_ids) for row in probes))

    def read_seconds(self, num_tokens: int) -> float:
        """Duration of chunks of `num_tokens` tokens; 0 before the first measurement."""
        return num_tokens * (self.prefill_token.value or 0.0)

    def ended(self, now: float, is_busy: bool) -> None:
        """Records the end of a job. `is_busy` is true when there are others."""
        if self._last_end is not None:
            self.job.add(now - self._last_end, 1)
        self._last_end = now if is_busy else None

    def retry_seconds(self, num_waiting: int) -> float:
        """Time until half of the waiting jobs have begun."""
        if (per_job := self.job.value) is None:
            return UNKNOWN_RETRY_SECONDS
        low, high = RETRY_SECONDS
        return min(high, max(low, per_job * num_waiting / 2))

    def least_seconds(self, job: Job, num_resident: int, others: Collection[Job]) -> float:
        """Lower bound for the duration of a new job: queued jobs that certainly go first, its share of the prefill, its
        answer.

        `num_resident` of its tokens are cached; `others` wait or run.

        Only an answer that cannot end early counts with all its tokens. Unmeasured quantities count as 0.
        """
        token, step = self.prefill_token.value or 0.0, self.decode_step.value or 0.0
        first = sum(1 for other in others if not other.is_running and _goes_first(other, job))
        running = (other for other in others if other.is_running)
        rivals = [other for other in running if not job.request.scheduling.outranks(other.request.scheduling)]
        # Chunks are processed in turn, so no job waits for more tokens of another than it has itself.
        own = max(0, job.prefill.num_prefill - num_resident)
        tokens = own + sum(min(other.prefill.num_prefill - other.prefill.num_placed, own) for other in rivals)
        return first * (self.job.value or 0.0) + tokens * token + _least_steps(job) * step


def _goes_first(other: Job, job: Job) -> bool:
    one, two = other.request.scheduling, job.request.scheduling
    is_before = one.outranks(two) or (one.account == two.account and one.priority == two.priority)
    return is_before and not other.request.is_paused


def _least_steps(job: Job) -> int:
    if not isinstance(job, SequenceJob):
        return 0
    return 1 if job.can_end_early else ceil_div(job.prompt.num_left, 1 + job.prompt.max_draft_tokens)
