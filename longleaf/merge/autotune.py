"""Choice of the fastest merge: measured at startup, on the real groups, for the sizes that decode uses. Later groups of
the same ranks, or of a subset, reuse the measurements."""

import logging
import time
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import torch

from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.config import MergeName
from longleaf.merge.base import Merge
from longleaf.rank_protocol.group_messages import MergeTiming

BATCHES = (1, 8, 64)
"""Measured numbers of rows; for a number in between, the measurement of the next larger one applies."""
SECONDS = 2.0
"""Time limit of all measurements."""
CALLS = 4
"""Calls per turn: a single one would be dominated by clock and scheduler noise."""
MIN_TURNS, MAX_TURNS = 3, 64
"""Turns of the fastest merge, if time allows: a median of three tolerates one outlier."""
CUTOFF, CUTOFF_SLACK = 1.5, 2.0
"""A merge whose best turn took CUTOFF times the best of all is not measured further; after n turns the limit is
CUTOFF * (1 + CUTOFF_SLACK / n), because early turns may all be outliers."""

log = logging.getLogger(__name__)


class AutotunedMerge:
    """Selects the fastest merge for each number of rows."""

    def __init__(self, merges: Mapping[str, Merge], timings: tuple[MergeTiming, ...], of_owners: Merge) -> None:
        self._by_rows = [(timing.rows, merges[timing.merge]) for timing in timings]
        self._of_owners = of_owners
        self.timings = timings

    def to_all(self, partial: Partial) -> Partial:
        num_rows = partial.lse_TH.shape[0]
        shrink = (merge for rows, merge in self._by_rows if num_rows <= rows)
        return next(shrink, self._by_rows[-1][1]).to_all(partial)

    def to_owner(self, partial: Partial) -> Partial:
        return self._of_owners.to_owner(partial)


def choose(merges: Mapping[str, Merge], groups: Groups, num_heads: int, dim: int, device: str) -> AutotunedMerge:
    """Measures the merges in turns for each of BATCHES. Every rank uses the times of the slowest rank, so all choose
    alike.

    Owned rows always use the algorithm that minimises traffic between machines.
    """
    timings: list[MergeTiming] = []
    for num_rows in BATCHES:
        out_THD = torch.randn(num_rows, num_heads, dim, dtype=torch.float32)
        partial = Partial(out_THD.to(device), out_THD[..., 0].contiguous().to(device))
        timings.append(_race(merges, groups, partial))
    if groups.world.rank == 0:
        for timing in timings:
            log.info("merge for up to %d rows: %s", timing.rows, describe(timing))
    return AutotunedMerge(merges, tuple(timings), merges[_of_owners(groups)])


def reuse(
    timings: Sequence[MergeTiming], merges: Mapping[str, Merge], groups: Groups, num_heads: int, dim: int, device: str
) -> AutotunedMerge:
    """Reuses measurements of other groups: their choice for each number of rows, or the next best one if these groups
    lack it. Each chosen merge is run once, which compiles kernels and opens connections. All ranks call it at the same
    time, with the same measurements."""
    timings = tuple(msgspec.structs.replace(timing, merge=_next_best(timing, merges)) for timing in timings)
    for name in dict.fromkeys(timing.merge for timing in timings):
        merges[name].to_all(Partial.identity(1, num_heads, dim, device=device))
    return AutotunedMerge(merges, timings, merges[_of_owners(groups)])


def _next_best(timing: MergeTiming, merges: Mapping[str, Merge]) -> str:
    if timing.merge in merges:
        return timing.merge
    return min((name for name in timing.microseconds if name in merges), key=timing.microseconds.__getitem__)


def _of_owners(groups: Groups) -> MergeName:
    """Merge of owned rows: node first if there are several machines with equally many ranks."""
    return "hierarchy" if groups.rail is not None and groups.topology.is_even else "gather"


def describe(timing: MergeTiming) -> str:
    """The choice and its reason, for people."""
    others = sorted((us, name) for name, us in timing.microseconds.items() if name != timing.merge)
    why = ", ".join(f"{name} {us:,.0f}" for us, name in others)
    return f"{timing.merge}, {timing.microseconds[timing.merge]:,.0f} us" + (f" ({why})" if why else "")


def _race(merges: Mapping[str, Merge], groups: Groups, partial: Partial) -> MergeTiming:
    """Alternating turns until the time limit; the merge with the smallest median wins."""
    begin = time.perf_counter()
    for merge in merges.values():
        merge.to_all(partial)
    turns: dict[str, list[float]] = {name: [] for name in merges}
    running = list(merges)
    for number in range(1, MAX_TURNS + 1):
        taken = [_turn(merges[name], partial) for name in running]
        times = torch.tensor([*taken, time.perf_counter() - begin], device=partial.lse_TH.device)
        slowest = groups.world.all_reduce(times, "max")
        for name, turn in zip(running, slowest, strict=False):
            turns[name].append(turn.item())
        limit = CUTOFF * (1 + CUTOFF_SLACK / number) * min(map(min, turns.values()))
        running = [name for name in running if min(turns[name]) <= limit]
        if slowest[-1] > SECONDS / len(BATCHES) or (len(running) == 1 and number >= MIN_TURNS):
            break
    medians = {name: median(found) * 1e6 for name, found in turns.items()}
    return MergeTiming(len(partial.lse_TH), min(running, key=medians.__getitem__), medians)


def _turn(merge: Merge, partial: Partial) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        merge.to_all(partial)
    if partial.lse_TH.is_cuda:
        torch.cuda.synchronize(partial.lse_TH.device)  # the process's default GPU may be another rank's
    return (time.perf_counter() - begin) / CALLS
