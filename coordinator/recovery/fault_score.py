"""Fault scores: how strongly the work of a step is suspected of having ended an epoch."""

LOSS_SCORE = 1
"""Score for a process that exited: the cause is more often its machine than the work."""
BREAK_SCORE = 2
"""Score for ranks that raised errors or hung together. Work with this score runs with nothing else under way."""
DROP_SCORE = 4
"""Score at which work is dropped: its epochs broke twice, or lost ranks four times, without progress
past the position where they ended."""


def raise_score(before: int, amount: int, *, is_certain: bool) -> int:
    """The new score. If other work was under way as well, the score does not exceed the level at which both run
    separately."""
    return before + amount if is_certain else max(before, min(before + amount, BREAK_SCORE))
