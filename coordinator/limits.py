"""How large a job may be, and how many blocks it takes."""

from coordinator.blocks import Placer
from coordinator.jobs import Job
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument


class Limits:
    """What the model's positions and the pool of all ranks allow, even when nothing else is held."""

    def __init__(self, config: EngineConfig, placer: Placer, max_positions: int) -> None:
        self._config = config
        self._placer = placer
        self._max_positions = max_positions

    def num_prefill(self, num_tokens: int) -> int:
        """Prompt tokens that go through chunks: all but the last, or none of a short prompt."""
        return num_tokens - 1 if num_tokens >= self._config.replicate_below else 0

    def check(self, job: Job, field: str, max_tokens: int) -> int:
        """The blocks that the job takes, generating `max_tokens`. Raises InvalidArgument naming `field`."""
        total = job.start + len(job.token_ids) + max_tokens
        if total > self._max_positions:
            limit = f"the model's limit is {self._max_positions} positions"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens)}; {limit}")
        blocks = self._blocks(job, max_tokens)
        if sum(segment.num_blocks for segment in job.path) + blocks > self._placer.num_blocks:
            size = self._placer.block_size
            limit = f"the pool of all ranks holds {self._placer.num_blocks * size}, in blocks of {size}"
            raise InvalidArgument(field, f"{_sum(job, field, max_tokens)}; {limit}")
        return blocks

    def _blocks(self, job: Job, max_tokens: int) -> int:
        # The token that is sampled last is never fed back, so it needs no slot.
        rows = len(job.token_ids) - job.num_prefill + max(0, max_tokens - 1)
        return self._placer.blocks_needed(job.num_prefill, rows)


def _sum(job: Job, field: str, max_tokens: int) -> str:
    own = "text" if field == "text" else "input"
    parts = f"{job.start} tokens of context and {len(job.token_ids)} of {own}"
    more = f" and {max_tokens} to generate" if max_tokens else ""
    return f"{parts}{more} make {job.start + len(job.token_ids) + max_tokens}"
