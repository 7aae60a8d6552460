"""How large a job may be, and how many blocks it takes."""

from coordinator.blocks import Placer
from coordinator.jobs import Job
from coordinator.positions import Positions
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument


class Limits:
    """What the model's positions and the pool of all ranks allow, even when nothing else is held."""

    def __init__(self, config: EngineConfig, placer: Placer, positions: Positions) -> None:
        self._config = config
        self._placer = placer
        self.positions = positions

    def num_prefill(self, num_tokens: int, num_samples: int) -> int:
        """How many of the `num_tokens` of a prompt that are not held go through chunks: all but the last, which is
        computed for each sample, or none of a short prompt of one sample."""
        return num_tokens - 1 if num_samples > 1 or num_tokens >= self._config.replicate_below else 0

    def num_prefill_again(self, num_tokens: int, num_samples: int) -> int:
        """The same for a prompt with what was generated: whole blocks, so that no cut needs more blocks than others."""
        num_prefill = self.num_prefill(num_tokens, num_samples)
        return num_prefill - num_prefill % self._placer.block_size

    def check(self, job: Job, field: str, max_tokens: int, num_tails: int = 1) -> int:
        """The blocks that the job takes, generating `max_tokens` in each of its tails. Raises InvalidArgument naming
        `field`."""
        total = job.start + len(job.token_ids) + max_tokens
        if total > self.positions.limit:
            limit = f"the model's limit is {self.positions.limit} positions, {self.positions.limit_name}"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens, 1)}; {limit}")
        if total > job.capacity:
            limit = f"the context was created for {job.capacity} positions, and only a new one can have more"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens, 1)}; {limit}")
        blocks = self.num_blocks(job, max_tokens, num_tails)
        if job.path.num_blocks + blocks > self._placer.num_blocks:
            size = self._placer.block_size
            limit = f"the pool of all ranks holds {self._placer.num_blocks * size}, in blocks of {size}"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens, num_tails)}; {limit}")
        return blocks

    def num_blocks(self, job: Job, max_tokens: int, num_tails: int) -> int:
        """The blocks that the job takes for what it has not read yet and for answers of `max_tokens`, exactly."""
        # The token that is sampled last is never fed back, so it needs no slot.
        rows = len(job.token_ids) - job.num_prefill + max(0, max_tokens - 1)
        prefill = self._placer.blocks_needed(job.num_prefill - job.num_read, 0)
        return prefill + num_tails * self._placer.blocks_needed(0, rows)


def _sum(job: Job, field: str, max_tokens: int, num_tails: int) -> str:
    own = "text" if field == "text" else "input"
    parts = f"{job.start} tokens of context and {len(job.token_ids)} of {own}"
    each = f"{num_tails} times " if num_tails > 1 else ""
    more = f" and {each}{max_tokens} to generate" if max_tokens else ""
    return f"{parts}{more} make {job.start + len(job.token_ids) + num_tails * max_tokens}"
