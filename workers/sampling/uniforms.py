"""Numbers in [0, 1) from a counter-based generator: key `seed`, counter `token_index`. They depend on nothing else."""

import numpy as np

PER_COUNT = 4
"""Numbers that Philox generates per counter value."""


def uniform(seed: int, token_index: int) -> float:
    """The number of one token."""
    return float(_from(seed, token_index).random())


def uniforms(seed: int, token_index: int, num_tokens: int) -> list[float]:
    """The numbers of `num_tokens` consecutive tokens, in little more time than that of one."""
    return _from(seed, token_index).random(PER_COUNT * num_tokens)[::PER_COUNT].tolist()


def _from(seed: int, token_index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed, counter=token_index))
