"""How much the work of a step is suspected of what ended an epoch in it."""

LOSS = 1
"""A process ended: more often for its machine's sake than for the work's."""
BREAK = 2
"""Ranks raised there, or hung together. Work that is suspected so much is done with nothing else under way."""
GUILTY = 4
"""Of what is given up: it broke two epochs, or ranks were lost in four, and it never came past that place."""


def add(before: int, amount: int, *, is_certain: bool) -> int:
    """More of it. Where other work was under way too, there comes to be no more than has both be done apart."""
    return before + amount if is_certain else max(before, min(before + amount, BREAK))
