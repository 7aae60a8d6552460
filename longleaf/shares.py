"""The parts into which `--weights sharded` divides the weights of a model, and the number of parts per rank.

A part is 1/240 of each divided parameter. A share is the set of parts that a rank holds. At the start, shares are even
and contiguous.
"""

NUM_PARTS = 240
"""Divisible by 2 to 6, 8, 10, 12, 15 and 16: shares of as many ranks have the same number of parts."""


def even_share(index: int, count: int) -> tuple[int, ...]:
    """The parts of rank `index` if `count` ranks hold all parts."""
    return tuple(range(NUM_PARTS * index // count, NUM_PARTS * (index + 1) // count))


def most_parts(num_ranks: int, num_spare: int) -> int:
    """The largest number of parts of a rank after the loss of `num_spare` of `num_ranks` ranks."""
    return -(-NUM_PARTS // (num_ranks - num_spare))
