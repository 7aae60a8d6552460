"""How large a job may be, and how many blocks it takes."""

from coordinator.placement.blocks import Blocks, Placer
from coordinator.placement.positions import Positions
from coordinator.placement.segments import Segments
from coordinator.scheduling.jobs import Job
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument


class Limits:
    """What the model's positions and the pool of all ranks allow, even when nothing else is held."""

    def __init__(self, config: EngineConfig, placer: Placer, segments: Segments, positions: Positions) -> None:
        self._config = config
        self._placer = placer
        self._segments = segments
        self.positions = positions

    def num_prefill(self, num_tokens: int, num_samples: int) -> int:
        """How many of the `num_tokens` of a prompt that are not held go through chunks: all but the last, which is
        computed for each sample, or none of a short prompt of one sample."""
        return num_tokens - 1 if num_samples > 1 or num_tokens >= self._config.replicate_below else 0

    def num_prefill_again(self, num_tokens: int, num_samples: int) -> int:
        """The same for a prompt with what was generated: whole blocks, so that no cut needs more blocks than others."""
        num_prefill = self.num_prefill(num_tokens, num_samples)
        return num_prefill - num_prefill % self._placer.block_size

    def check(self, job: Job, field: str, max_tokens: int, num_tails: int = 1) -> Blocks:
        """The blocks that the job takes, generating `max_tokens` in each of its tails. Raises InvalidArgument naming
        `field`."""
        total = job.start + len(job.token_ids) + max_tokens
        if total > self.positions.limit:
            limit = f"the model's limit is {self.positions.limit:,} positions, {self.positions.limit_name}"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens, 1)}; {limit}")
        if total > job.capacity:
            limit = f"the context was created for {job.capacity:,} positions, and only a new one can have more"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens, 1)}; {limit}")
        blocks = self.most_blocks(job, max_tokens, num_tails)
        held = self._segments.holdings.num_blocks(job.path)
        least = Blocks(held.sharded, min(held.windows, self._placer.window_pool.seen_blocks))
        if limit := self._too_small(least + blocks):
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens, num_tails)}; {limit}")
        return blocks

    def _too_small(self, needed: Blocks) -> str:
        """What cannot hold so many blocks, if anything."""
        total, size = self._placer.num_blocks, self._placer.block_size
        if needed.sharded > total.sharded:
            return f"the pool of all ranks holds {total.sharded * size:,}, in blocks of {size:,}"
        if needed.windows > total.windows:
            held = f"the windows' pool holds {total.windows * size:,} tokens, in blocks of {size:,}"
            return f"{held}, and {needed.windows * size:,} are needed: --window-bytes sets its size"
        return ""

    def num_blocks(self, job: Job, max_tokens: int, num_tails: int) -> Blocks:
        """The blocks that the job takes for what it has not read yet and for answers of `max_tokens`."""
        num_rest = len(job.token_ids) - job.num_prefill
        # The token that is sampled last is never fed back, so it needs no slot.
        num_rows = num_rest + max(0, max_tokens - 1)
        num_prefill = job.num_prefill - job.num_read
        return self._placer.blocks_needed(num_prefill, num_rows, num_tails=num_tails, num_at_once=num_rest)

    def most_blocks(self, job: Job, max_tokens: int, num_tails: int) -> Blocks:
        """The same, whenever the job may be preempted: then it reads its answer in chunks, and other rows at once."""
        num_tokens = len(job.token_ids) + max(0, max_tokens - 1)
        num_prefill = max(job.num_prefill, self.num_prefill(num_tokens, num_tails))
        at_once = max(self._config.replicate_below, self._placer.block_size)
        num_rows = min(num_tokens, at_once + max_tokens)
        most = self._placer.blocks_needed(num_prefill, num_rows, num_tails=num_tails, num_at_once=at_once)
        return Blocks(self.num_blocks(job, max_tokens, num_tails).sharded, most.windows)


def _sum(job: Job, field: str, max_tokens: int, num_tails: int) -> str:
    own = "text" if field == "text" else "input"
    parts = f"{job.start:,} tokens of context and {len(job.token_ids):,} of {own}"
    each = f"{num_tails} times " if num_tails > 1 else ""
    more = f" and {each}{max_tokens:,} to generate" if max_tokens else ""
    return f"{parts}{more} make {job.start + len(job.token_ids) + num_tails * max_tokens:,}"
