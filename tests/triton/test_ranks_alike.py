"""Ranks of a device go the same way through a step: they capture and replay the same exchanges, of as many rows."""

from unittest.mock import patch

import pytest

from tests.support.accelerator import captured as captured_ranks
from tests.support.accelerator.captured import DeviceFleet, DeviceRank
from tests.support.accelerator.drive import SIZES, Drive, fleets, small_checkpoints
from tests.support.accelerator.reference_kernels import ReferenceLauncher
from tests.support.fakes.cuda_graphs import OpRecorder, RecordedGraphs
from workers.cuda_graphs.graphs import CaptureRefused
from workers.sampling.fixed_shape import Needs
from workers.step.last_tokens import HostIds

TWO_RANKS = {"world_size": 2, "merge": "gather"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return small_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def without_room(fleet, number):
    """Tables of the rank have no room for anything."""
    fixed = fleet.ranks[number].fixed
    for bucket in fixed._buckets:
        for variant in bucket.variants:
            for tables in variant.tables.values():
                tables.fill = lambda *_: None


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_exchange_as_many_rows_where_the_tables_of_one_have_no_room(number, folder_of):
    made = Drive(*fleets(folder_of("llama"), TWO_RANKS, ReferenceLauncher(), ReferenceLauncher()), seed=7)
    for fleet in (made.eager, made.captured):
        without_room(fleet, number)
    made.run(24)
    assert "3 rows" in made.seen, "a bucket has more"


class ScarceGraphs(RecordedGraphs):
    """For so many parts of steps there is room."""

    def __init__(self, num_parts):
        super().__init__()
        self._num_parts = num_parts

    def check_room(self):
        if not self._num_parts:
            raise CaptureRefused("there is no room")
        self._num_parts -= 1


@pytest.mark.parametrize("scarce", [0, 1])
def test_all_ranks_capture_the_same_exchanges(scarce, folder_of, caplog):
    settings = {**SIZES, "kv_bytes": 24_000, **TWO_RANKS}
    fleet = DeviceFleet(
        folder_of("llama"),
        ReferenceLauncher(),
        is_captured=True,
        make_graphs=lambda number: ScarceGraphs(5 if number == scarce else 1000),
        **settings,
    )
    first, second = (captured(rank) for rank in fleet.ranks)
    assert second
    assert second == {key for key in first if not is_of_rank_0(key)}
    assert len(second if scarce else first) == 5
    assert {"there is no room", "another rank cannot capture it"} == {text.split(": ")[-1] for text in caplog.messages}


def test_a_step_that_ends_at_once_ends_after_the_one_before(folder_of):
    made = Drive(*fleets(folder_of("llama"), {}, ReferenceLauncher(), ReferenceLauncher()), seed=0)
    rank, ended = made.captured.ranks[0], []
    runner = rank.epoch._decode
    finish = runner._finish
    runner._finish = lambda work, *others: ended.append(work) or finish(work, *others)
    made.bench.ask(3, 6)
    first, second = made.bench.schedule(), made.bench.schedule()
    rank.start(first)
    assert not ended
    runner._verifier.is_tracking = lambda rows: True
    rank.start(second)
    assert [work.rows[0].start for work in ended] == [plan.work.rows[0].start for plan in (first, second)]


def captured(rank):
    works = rank.fixed._works.items()
    return {key for key, work in works if isinstance(getattr(work, "__self__", None), OpRecorder)}


def is_of_rank_0(key):
    return isinstance(key, tuple) and isinstance(key[1], Needs)


def test_no_rank_pads_its_rows_where_another_one_cannot(folder_of):
    def on_host(spec, *others):
        rank = DeviceRank(spec, *others)
        if spec.member == 1:
            rank.last_ids = HostIds()
        return rank

    settings = {**SIZES, "kv_bytes": 24_000, **TWO_RANKS}
    with patch.object(captured_ranks, "DeviceRank", on_host):
        fleet = DeviceFleet(folder_of("llama"), ReferenceLauncher(), is_captured=True, **settings)
    assert [rank.fixed for rank in fleet.ranks] == [None, None]
