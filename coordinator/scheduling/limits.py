"""Limits on the size of a job, and the number of blocks that it takes."""

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.positions import Positions
from coordinator.kv_cache.segment_placement import SegmentPlacement, SegmentPlacements, count_all
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.scheduling.prefill_cursor import PrefillCursor
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument, ResourceExhausted

MAX_TOKENS = "sampling.max_token_count"
REPLACED_SECONDS = 5.0
"""Retry delay for a request that fits on all ranks, but not on the remaining ones."""


class JobLimits:
    """Limits from the model's positions and the pools of all ranks."""

    def __init__(
        self, config: EngineConfig, placer: BlockPlacer, placements: SegmentPlacements, positions: Positions
    ) -> None:
        self._config = config
        self._placer = placer
        self._placements = placements
        self.positions = positions
        self.may_grow = False
        """More ranks are expected."""

    def expect_ranks(self) -> None:
        """More ranks are expected from now on."""
        self.may_grow = True

    def confirm_ranks(self) -> None:
        """No more ranks are expected."""
        self.may_grow = False

    def wanted(self, placements: Sequence[SegmentPlacement]) -> BlockCount:
        """Blocks of the segments once nothing of them is lost."""
        blocks = count_all(placements)
        if not self._placements.is_whole:
            size = self._placer.block_size
            blocks = sum((placement.num_wanted(size) for placement in placements), BlockCount())
        return blocks

    def fit_together(self, segments: Iterable[Segment]) -> bool:
        """Whether the segments, and the blocks that are needed during recomputation, fit at the same time."""
        wanted = self.wanted(self._placements.for_segments(segments)) + self.num_scratch()
        return wanted.fits(self._placer.num_blocks)

    def num_scratch(self, segments: Container[int] | None = None) -> BlockCount:
        """Temporary blocks for the recomputation of lost keys, by default of all segments. `segments` has ids."""
        lossy = self._placements.with_losses
        placements = [one for one in lossy if segments is None or one.segment.id in segments]
        sizes = [placement.loss.num_tokens for placement in placements if placement.loss]
        return BlockCount(windows=max(map(self._placer.window_pool.chunk_blocks, sizes), default=0))

    @property
    def least_rows(self) -> int:
        """Minimum number of last tokens of a prompt that are computed as rows. Some recurrent states (Nemotron-H)
        advance by another formula with one row than with several, and `generate` computes prompts with several."""
        windows = self._placer.windows
        return 2 if windows is not None and windows.is_state else 1

    def num_prefill(self, num_tokens: int, num_samples: int, num_rows: int = 1) -> int:
        """How many of the `num_tokens` uncached tokens of a prompt are processed in chunks: all but the last
        `num_rows`, which are computed for each sample, or none of a short prompt of one sample."""
        num_rows = max(num_rows, self.least_rows)
        has_chunks = num_samples > 1 or num_tokens >= self._config.replicate_below
        return max(0, num_tokens - num_rows) if has_chunks else 0

    def num_prefill_again(self, num_tokens: int, num_samples: int) -> int:
        """How many tokens are processed in chunks where a prompt is recomputed with its answer. These are whole blocks,
        so that the number of blocks does not depend on the chunk sizes."""
        num_prefill = self.num_prefill(num_tokens, num_samples)
        return num_prefill - num_prefill % self._placer.block_size

    def check(
        self, prefill: PrefillCursor, capacity: int, field: str, max_tokens: int, num_tails: int = 1
    ) -> BlockCount:
        """The blocks of a new job with `capacity` positions that generates `max_tokens` in each of its tails. Raises
        InvalidArgument naming `field` where it is too large even without other jobs, and ResourceExhausted where it may
        fit when more ranks are available."""
        num_given = prefill.path.end + len(prefill.token_ids)
        total = num_given + num_fed(max_tokens)
        if total > self.positions.limit:
            limit = f"the model's limit is {self.positions.limit:,} positions, {self.positions.limit_name}"
            limit += _most(field, self.positions.limit - num_given + 1)
            raise InvalidArgument(field, f"{_sum(prefill, field, max_tokens, 1)}; {limit}")
        if total > capacity:
            limit = f"the context was created for {capacity:,} positions; for more, create a new context"
            limit += _most(field, capacity - num_given + 1)
            raise InvalidArgument(field, f"{_sum(prefill, field, max_tokens, 1)}; {limit}")
        blocks = self.most_blocks(prefill, max_tokens, num_tails)
        if limit := self._too_small(prefill.path, blocks):
            limit += _most(field, self._most_tokens(prefill, max_tokens, num_tails))
            message = f"{_sum(prefill, field, max_tokens, num_tails)}; {limit}"
            if self.may_grow:
                raise ResourceExhausted("pool", f"{message} until a lost rank is replaced", REPLACED_SECONDS)
            raise InvalidArgument(field, message)
        return blocks

    def _most_tokens(self, prefill: PrefillCursor, max_tokens: int, num_tails: int) -> int:
        """Maximum number of tokens that can be generated in each tail, up to `max_tokens`, if nothing else is held."""

        def is_too_many(count: int) -> bool:
            return not self.fits_alone(prefill.path, self.most_blocks(prefill, count, num_tails))

        return bisect_left(range(1, max_tokens + 1), True, key=is_too_many)

    def fits_alone(self, path: TokenPath, blocks: BlockCount) -> bool:
        """Whether the blocks fit if nothing is held but the path that they continue."""
        return not self._too_small(path, blocks)

    def _too_small(self, path: TokenPath, blocks: BlockCount) -> str:
        """The limit that the blocks and the path together exceed; empty if they fit."""
        resident = self.wanted(self._placements.for_segments(path.segments))
        needed = blocks + BlockCount(resident.sharded, min(resident.windows, self._placer.window_pool.seen_blocks))
        total, size = self._placer.num_blocks, self._placer.block_size
        if needed.sharded > total.sharded:
            return f"the pool of all ranks has {total.sharded * size:,} tokens in blocks of {size:,}"
        if needed.windows > total.windows:
            size, windows = self._placer.window_block_size, self._placer.windows
            if windows is not None and windows.is_state:
                there = f"the state pool has {total.windows:,} recurrent states"
                return f"{there}, and {needed.windows:,} are needed: serve with more --state-bytes"
            resident = f"the window pool has {total.windows * size:,} tokens in blocks of {size:,}"
            return f"{resident}, and {needed.windows * size:,} are needed: serve with more --window-bytes"
        return ""

    def check_room(self, needed: BlockCount, in_use: BlockCount, retry_seconds: float | None) -> None:
        """Raises ResourceExhausted unless a job fits beside the held blocks. `retry_seconds` is None if it will never
        fit."""
        total, windows = self._placer.num_blocks, self._placer.windows
        noun = "window" if windows is None else windows.noun
        pools = {
            "pool": (needed.sharded, total.sharded, in_use.sharded),
            f"{noun} pool": (needed.windows, total.windows, in_use.windows),
        }
        for pool, counts in pools.items():
            size = self._placer.block_size if pool == "pool" else self._placer.window_block_size
            tokens, room, taken = (count * size for count in counts)
            if tokens + taken <= room:
                continue
            more = "" if pool == "pool" else f", or serve with more --{noun}-bytes"
            units = "recurrent states" if pool == "state pool" else "tokens"
            # The number of kept tokens is reported to admins only: it would reveal the usage of other tenants.
            retained = f"{tokens:,} {units} are needed, and contexts use too many of {room:,}"
            text = f"{retained}; delete a context{more}"
            if self.may_grow:
                message = f"{retained} until a lost rank is replaced"
                raise ResourceExhausted(pool, message, retry_seconds or REPLACED_SECONDS)
            if retry_seconds is not None:
                text = f"{tokens:,} {units} are needed, and contexts and running generations use too many of {room:,}"
            raise ResourceExhausted(pool, text, retry_seconds)

    def num_blocks(self, prefill: PrefillCursor, max_tokens: int, num_tails: int) -> BlockCount:
        """Blocks for the tokens not processed yet and for answers of `max_tokens`."""
        num_rest = len(prefill.token_ids) - prefill.num_prefill
        num_rows = num_rest + num_fed(max_tokens)
        num_prefill = prefill.num_prefill - prefill.num_computed
        return self._placer.blocks_needed(num_prefill, num_rows, num_tails=num_tails, num_at_once=num_rest)

    def most_blocks(self, prefill: PrefillCursor, max_tokens: int, num_tails: int) -> BlockCount:
        """Maximum number of blocks for the tokens not processed yet and for answers, even if the job is preempted: then
        the answer is recomputed in chunks, with other row counts."""
        num_tokens = len(prefill.token_ids) + num_fed(max_tokens)
        num_prefill = max(prefill.num_prefill, self.num_prefill(num_tokens, num_tails))
        num_rest = len(prefill.token_ids) - prefill.num_prefill
        at_once = max(self._config.replicate_below, self._placer.block_size, num_rest)
        num_rows = min(num_tokens, at_once + max_tokens)
        most = self._placer.blocks_needed(num_prefill, num_rows, num_tails=num_tails, num_at_once=at_once)
        return BlockCount(self.num_blocks(prefill, max_tokens, num_tails).sharded, most.windows)


def num_fed(max_tokens: int) -> int:
    """Number of tokens of an answer that the model processes. The last one is only sampled: it takes no position and no
    slot."""
    return max(0, max_tokens - 1)


def _most(field: str, num_tokens: int) -> str:
    return f": at most {num_tokens:,} can be generated" if field == MAX_TOKENS else ""


def _sum(prefill: PrefillCursor, field: str, max_tokens: int, num_tails: int) -> str:
    own = "text" if field == "text" else "input"
    resident, read = prefill.path.end, len(prefill.token_ids)
    each = f"{num_tails} times " if num_tails > 1 else ""
    more = f" and {each}{max_tokens:,} to generate" if max_tokens else ""
    total = resident + read + num_tails * num_fed(max_tokens)
    last = ", since the last token generated takes no position" if max_tokens else ""
    return f"{resident:,} tokens of context and {read:,} of {own}{more} make {total:,}{last}"
