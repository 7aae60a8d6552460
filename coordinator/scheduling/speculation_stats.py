"""Counters of speculative decoding, updated at each commit."""

from dataclasses import dataclass


@dataclass
class DraftCounts:
    """Tokens and steps of all answers since the service began, with drafts or without."""

    num_drafted: int = 0
    """Number of draft tokens that were verified in a step."""
    num_accepted: int = 0
    """Number of draft tokens that became tokens of answers."""
    num_sampled: int = 0
    """Number of tokens of answers."""
    num_sequence_steps: int = 0
    """Number of steps that yielded these tokens; a step counts once for each answer in it."""

    def add(self, num_drafted: int, num_accepted: int, num_sampled: int) -> None:
        """Adds the result of one step for one answer."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_sampled += num_sampled
        self.num_sequence_steps += 1

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per step and answer; 0 before the first step."""
        return self.num_sampled / self.num_sequence_steps if self.num_sequence_steps else 0.0
