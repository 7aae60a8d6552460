"""Selects the sequences that have rows in a step, where the rows of all would take too much memory or time. Pure."""

from collections.abc import Sequence
from math import inf

from coordinator.scheduling.sequences import SequenceJob
from longleaf.rank_protocol.step import MAX_ATTRIBUTED_SPANS

MAX_PROBED = 1024
"""Maximum number of probe rows in a step if no other sequence runs: each scored row takes as many numbers as the
vocabulary has tokens."""


class RowSelector:
    """Sequences with probes or attention spans take turns; all others have rows in each step."""

    def __init__(self) -> None:
        self._late = dict[int, int]()
        """Ids of the sequences left out of the last step, and their places in the next one."""

    def next(self, jobs: Sequence[SequenceJob], most_probed: int) -> list[SequenceJob]:
        """The ready sequences that have rows in the next step, at least one. They have at most `most_probed` probe
        rows, or a single probe, and at most MAX_ATTRIBUTED_SPANS spans."""
        most_probed, num_probed, num_spans, chosen = min(MAX_PROBED, most_probed), 0, 0, set[int]()
        ordered = sorted(jobs, key=lambda job: self._late.get(job.id, inf))
        for job in ordered:
            probed = job.prefill.num_unplaced if job.prompt.is_probe else 0
            spans = job.num_spans
            if num_spans + spans > MAX_ATTRIBUTED_SPANS or (
                probed and num_probed and num_probed + probed > most_probed
            ):
                continue
            num_probed, num_spans = num_probed + probed, num_spans + spans
            chosen.add(job.id)
        self._late = {job.id: place for place, job in enumerate(ordered) if job.id not in chosen}
        return [job for job in jobs if job.id in chosen]
