"""The data of each phase of the embedded model's training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """Shape of the sequences in one phase of the training."""

    length: int
    """Tokens per sequence."""
    batch: int
    questions: int
    most_facts: int
    repeats: float
    """Share of sequences that repeat spans of text and ask nothing."""
    easy: bool
    """One wording, and keys of two words."""
    log_copies: float
    """Largest ln R: how many copies of itself a filler token counts for."""
    bare: float = 0.0
    """Share of sequences whose document is a few facts, with little or nothing around them."""
    lists: float = 0.0
    """Share of sequences whose document is a list of numbered keys."""
    is_last: bool = False
    """More questions, fewer words for more keys, keys of one word twice, more weight on where a repeated key ends."""
