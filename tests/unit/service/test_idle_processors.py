"""The notice at a start about idle processors."""

import pytest

from coordinator.service import idle_processors


@pytest.mark.parametrize(
    ("ranks", "threads", "devices", "processors", "message"),
    [
        (1, 1, ["cpu"], 16, "1 thread computes on 16 processors: --threads N (per rank) uses more"),
        (2, 2, ["cpu", "cpu"], 16, "4 threads compute on 16 processors: --threads N (per rank) uses more"),
        (2, 4, ["cpu", "cpu"], 16, ""),
        (1, 1, ["cpu"], 2, ""),
        (1, 1, ["cuda:0"], 16, ""),
    ],
)
def test_start_that_leaves_most_processors_idle_prints_a_notice(
    ranks: int, threads: int, devices: list[str], processors: int, message: str
) -> None:
    assert idle_processors(ranks, threads, devices, processors) == ((message,) if message else ())
