"""Whole ranks, as threads, that join, execute plans and leave over a simulated NCCL: all make the same calls."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from longleaf.comm import process_group
from longleaf.errors import CollectiveMismatch
from longleaf.rank_protocol.group_messages import Join
from longleaf.rank_protocol.step import Decode, Prefill
from tests.support.fakes.torch_distributed import FakeDistributed
from tests.support.scheduling import Bench
from tests.support.threads import config_for, make_spec
from workers import rank as module
from workers.rank import Rank
from zoo.checkpoints import make_checkpoint


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, num_layers=2)


class Fleet:
    """Loaded ranks on the machines of `machines`, a letter per rank; they execute the plans of a scheduler."""

    def __init__(self, folder: Path, machines: str, **settings: object) -> None:
        size = len(machines)
        self.calls, self._nodes = FakeDistributed(size), tuple(machines)
        config = config_for(folder, world_size=size, chunk_size=32, block_size=4, replicate_below=8, **settings)
        self.ranks = [Rank(make_spec(rank, config)) for rank in range(size)]
        for rank in self.ranks:
            rank.load()
        self.ranks[0]._next_store = self.calls.store
        ready = self.ranks[0]._ready
        same = ("chunk_size", "block_size", "replicate_below", "window_keys", "max_sequences")
        options = {name: getattr(config, name) for name in same}
        self.bench = Bench(blocks=(ready.num_blocks,) * size, windows=ready.windows, world_size=size, **options)

    def live(self, *, skips_step: int | None = None) -> Counter[type]:
        """Joins, reads a document and two prompts, answers, leaves; returns the kinds of executed work. The rank
        `skips_step` does not execute the last plan."""
        self.bench.ingest("book", 90)
        plans = self.bench.run()
        self.bench.ask(40, 3, "book")
        self.bench.ask(5, 3, None)
        plans += self.bench.run()

        def work(number: int) -> str:
            rank = self.ranks[number]
            ready = rank.join(Join(1, number, "", 0, self._nodes))
            for plan in plans[:-1] if number == skips_step else plans:
                rank.execute(plan)
            rank.close()
            return ready.transport

        with (
            patch.object(process_group, "dist", self.calls),
            patch.object(module, "connect_store", lambda *_: self.calls.store),
            patch.object(process_group, "place_of", lambda _: f"GPU-{self.calls.own_rank}"),
        ):
            assert set(self.calls.run(work)) == {"nccl"}
        self.calls.check()
        return Counter(type(plan.work) for plan in plans)


@pytest.mark.parametrize(
    ("machines", "settings"),
    [
        ("aaa", {"merge": "butterfly", "prefill": "queries"}),
        ("aab", {"merge": "hierarchy", "prefill": "keys", "window_keys": "replicated"}),
    ],
)
def test_ranks_make_the_same_nccl_calls_from_join_to_leave(folder, machines, settings):
    fleet = Fleet(folder, machines, **settings)
    done = fleet.live()
    assert done[Prefill] > 2
    assert done[Decode] > 2
    assert Counter(fleet.calls.ended) == Counter((rank, "aborted") for rank in range(3))


def test_rank_that_skips_a_step_is_detected(folder):
    with pytest.raises(CollectiveMismatch, match="rank 1 waits"):
        Fleet(folder, "aaa", merge="gather").live(skips_step=2)


def test_graphs_are_released_before_their_groups(folder):
    ends: list[str] = []
    rank = Rank(make_spec(0, config_for(folder, world_size=1)))
    rank.load()
    rank.graphs = SimpleNamespace(release=lambda: ends.append("graphs"))
    rank.join(Join(1, 0, "", 0, ("here",)))
    rank._process_groups = SimpleNamespace(abort=lambda: ends.append("groups"))
    rank.close()
    assert ends == ["graphs", "groups"]
