"""How much the work of a step is suspected of what ended an epoch in it."""

LOSS = 1
"""A process ended: more often for its machine's sake than for the work's."""
BREAK = 2
"""Ranks raised there, or hung together. Work that has broken an epoch is a step of its own."""
GUILTY = 4
"""Of what is given up: it broke two epochs, or ranks were lost in four, and it never came past that place."""
