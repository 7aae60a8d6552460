"""Products of which the default run takes a part."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(rows: Iterable[Sequence[Any]], count: int) -> list[Any]:
    """Rows for `parametrize`: the first ones as they are, and the others only in `make test-slow`."""
    return [row if i < count else pytest.param(*row, marks=pytest.mark.slow) for i, row in enumerate(rows)]
