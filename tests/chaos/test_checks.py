"""The checks of the chaos tests detect the errors that they are written for."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from longleaf.config import EngineConfig
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.runs import Run
from longleaf.sampling import Logprobs
from longleaf.types import Delta
from tests.chaos.faults import num_epochs
from tests.chaos.load import Wrong, answer, check
from tests.chaos.points import ACTS, STEP, Fault, Points
from tests.chaos.reference import Known
from tests.chaos.soak import DEPLOYMENTS, FAMILIES, settings_of
from tests.chaos.views import KEY_TOLERANCE, Look, check_block_table, check_keys

KNOWN = Known("book", (7, 8), (3, 4, 5), (-1.0, -2.0, -3.0), 1e-3)
LOOK = Look((SegmentLayout(1, 0, (Run(0, 0, 4, (2,)), Run(1, 4, 8, (0,)))),), frozenset({9}), {}, {})
BOOK = {1: (0, {0: [(0, 4, 8)], 1: [(4, 6, 0), (6, 8, 2)]})}


class ScriptedClient:
    """A client whose service sends these token indices."""

    def __init__(self, *indices: int) -> None:
        self._indices = indices

    async def generate(self, *_: object, **__: object):
        for index in self._indices:
            yield Delta(index, (KNOWN.tokens[index],), "", (Logprobs(KNOWN.logprobs[index], ()),))


def read_answer(*indices: int) -> Any:
    return answer(ScriptedClient(*indices), KNOWN, Counter())  # type: ignore[arg-type]


async def test_known_answer_passes_the_check():
    assert check(await read_answer(0, 1, 2), KNOWN, 3) == 0.0


@pytest.mark.parametrize("indices", [(0, 0), (0, 2), (1,), (0, 1, 1)])
async def test_missing_or_repeated_token_index_is_detected(indices):
    with pytest.raises(Wrong, match="index"):
        await read_answer(*indices)


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [((3, 4, 6), (-1.0, -2.0, -3.0)), ((3, 4), (-1.0, -2.0)), ((3, 4, 5), (-1.0, -2.0, -3.01)), ((), ())],
)
def test_different_answer_is_detected(tokens, logprobs):
    with pytest.raises(Wrong):
        check(Known("book", (7, 8), tokens, logprobs, 1e-3), KNOWN, 3)


def test_different_key_is_detected():
    wanted = {0: np.ones((5, 2, 1, 4), np.float32), 1: np.ones((5, 2, 1, 4), np.float32)}
    found = {layer: keys.copy() for layer, keys in wanted.items()}
    found[1][3, 1, 0, 2] += KEY_TOLERANCE / 2
    assert 0 < check_keys(found, wanted, "book") < KEY_TOLERANCE
    found[1][3, 1, 0, 2] = np.nan
    with pytest.raises(AssertionError, match="keys differ"):
        check_keys(found, wanted, "book")


@pytest.mark.parametrize(
    "book",
    [
        {},
        {1: (4, BOOK[1][1])},
        {1: (0, {0: [(0, 4, 8)], 1: [(4, 8, 4)]})},
        {1: (0, {0: [(0, 4, 8)]})},
        {**BOOK, 2: (0, {})},
    ],
)
def test_different_block_table_is_detected(book):
    with pytest.raises(AssertionError, match="segment"):
        check_block_table(1, book, LOOK, 4)


def test_block_tables_that_differ_in_layout_or_pending_deletions_are_equal():
    check_block_table(1, {**BOOK, 9: (0, {})}, LOOK, 4)


def test_fault_is_injected_once_at_its_turn(monkeypatch):
    met = list[Fault]()
    monkeypatch.setitem(ACTS, "kill", met.append)
    points, fault = Points(), Fault(STEP, "kill", turn=3)
    points.reach(STEP)
    points.arm(fault)
    for turn in range(5):
        points.reach(STEP)
        points.reach("elsewhere")
        assert met == [fault] * (turn >= 2)
    points.arm(fault)
    points.arm(None)
    for _ in range(5):
        points.reach(STEP)
    assert met == [fault]


@pytest.mark.parametrize(
    ("settings", "num_lost", "expected"),
    [
        ({}, 1, 2),
        ({"weights": "sharded"}, 1, 1),
        ({"weights": "sharded", "spare_ranks": 1}, 1, 2),
        ({"weights": "sharded", "spare_ranks": 1}, 2, 1),
    ],
)
def test_a_group_without_room_for_all_weights_forms_no_epoch_before_its_replacements(settings, num_lost, expected):
    assert num_epochs(EngineConfig(model="m", world_size=3, **settings), num_lost) == expected


def test_consecutive_seeds_run_every_family_in_every_deployment():
    seeds = range(len(FAMILIES) * len(DEPLOYMENTS))
    found = [{key: value for key, value in settings_of(seed).items() if key != "window_keys"} for seed in seeds]
    assert all(found.count(deployment) == len(FAMILIES) for deployment in DEPLOYMENTS)
