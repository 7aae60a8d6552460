"""Which sequences have rows in a step, where those of all would take too much. Pure."""

from collections.abc import Sequence as Several
from math import inf

from coordinator.scheduling.sequences import Sequence
from longleaf.rank_protocol.step import MAX_TOLD_SPANS

MAX_PROBED = 1024
"""Rows of probes in a step, if nobody waits for it: each one that is scored takes as many numbers as the vocabulary has
tokens."""


class RowSelector:
    """Sequences that ask much of a step take turns; all others have rows in each."""

    def __init__(self) -> None:
        self._late = dict[int, int]()
        """Ids of those that had none in the last step, and which place they have in the next one."""

    def next(self, jobs: Several[Sequence], most_probed: int) -> list[Sequence]:
        """Those of the sequences that are ready which have rows in the next step, at least one: so many rows of
        probes, or one probe, and as many as MAX_TOLD_SPANS spans can be told to."""
        most_probed, num_probed, num_spans, chosen = min(MAX_PROBED, most_probed), 0, 0, set[int]()
        ordered = sorted(jobs, key=lambda job: self._late.get(job.id, inf))
        for job in ordered:
            probed = job.reading.num_unplaced if job.prompt.is_probe else 0
            spans = job.prompt.cuts.num_spans if job.prompt.cuts is not None else 0
            if num_spans + spans > MAX_TOLD_SPANS or (probed and num_probed and num_probed + probed > most_probed):
                continue
            num_probed, num_spans = num_probed + probed, num_spans + spans
            chosen.add(job.id)
        self._late = {job.id: place for place, job in enumerate(ordered) if job.id not in chosen}
        return [job for job in jobs if job.id in chosen]
