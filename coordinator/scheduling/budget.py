"""How many prompt tokens a step may read, so that running generations are not held up for long."""

from coordinator.scheduling.jobs import Job
from coordinator.scheduling.speeds import Speeds
from longleaf.config import EngineConfig

LEAST_SHARE = 0.25
"""A chunk may take this part of a decode step's time even when nothing is left of the target: reading must go on."""


class Budget:
    """Chunk sizes from measured speeds. Chunks and decode steps alternate, so a token comes after one of each.

    All chunks but the last of a prompt are whole blocks: then a prompt takes the same number of blocks however it is
    cut. They give every rank a block where `chunk_size` allows: shorter ones would take as long.
    """

    def __init__(self, config: EngineConfig, num_ranks: int, speeds: Speeds) -> None:
        block = config.block_size
        self._largest = max(block, config.chunk_size // block * block)
        self._smallest = min(self._largest, block * num_ranks)
        self._target = config.target_itl_ms / 1000
        self._speeds = speeds

    def chunk_size(self, job: Job, *, is_alone: bool) -> int:
        """Tokens that the next chunk of `job` may have; `is_alone` when nobody decodes."""
        if is_alone:
            return self._largest
        per_token = job.seconds_per_token or self._speeds.prefill_token.value
        if per_token is None:
            return self._smallest
        step = self._speeds.decode_step.value or 0.0
        seconds = max(self._target - step, LEAST_SHARE * step)
        if per_token * self._largest <= seconds:
            return self._largest
        return max(self._smallest, int(seconds / per_token) // self._smallest * self._smallest)
