"""Member processes that save their segments, lose them, and restore those of other members, beside steps and over
epochs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from longleaf.config import EngineConfig
from longleaf.rank_protocol.group_messages import Join, KvLayout
from longleaf.rank_protocol.snapshots import Discard, Fetch, Fetched, Save, Saved
from longleaf.rank_protocol.step import (
    Decode,
    Prefill,
    Restore,
    RestorePortion,
    Row,
    SamplingTerms,
    StepPlan,
    StepResult,
)
from longleaf.runs import Run
from longleaf.sampling import SamplingParams
from tests.support.fakes.kv_store import FolderStore
from tests.support.lives import Members
from tests.support.threads import config_for, make_spec
from workers.rank import Rank
from zoo.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(300)
IDS = tuple(3 + i * i % 400 for i in range(90))
PIECES = Run(0, 0, 48, (0, 1, 2)), Run(1, 48, 90, (4, 2, 0))
PARTS = [(Run(0, 0, 48, (0, 1, 2)),), (Run(1, 48, 90, (4, 2, 0)),)]
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=2)
    return config_for(folder, world_size=2, block_size=16, kv_bytes=1 << 20)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def members(config: EngineConfig, storage: Path) -> Iterator[Members]:
    made = Members("aa", msgspec.structs.replace(config, snapshot_url=str(storage)))
    try:
        made.load()
        yield made
    finally:
        made.close()


def read(epoch: int, step: int, *pieces: Run) -> StepPlan:
    return StepPlan(epoch, step, Prefill((0,), 0, IDS, pieces))


def questions(epoch: int, step: int, segment: int = 0) -> list[StepPlan]:
    terms = SamplingTerms(SamplingParams(max_tokens=NUM_TOKENS))
    rows = [Row(7, (segment, 5), 90, (5, 17, 31), (Run(0, 90, 93, (9,)),), 0, terms)]
    rows += [Row(7, (), 92 + index, (), (Run(0, 90, 93 + index, (9,)),), index) for index in range(1, NUM_TOKENS)]
    return [StepPlan(epoch, step + index, Decode((row,))) for index, row in enumerate(rows)]


def answer(members: Members, ranks: list[int], epoch: int, step: int, segment: int = 0) -> list[int]:
    plans = questions(epoch, step, segment)
    members.tell(ranks, *plans)
    found = [members.hear(StepResult, ranks[0]) for _ in plans]
    return [token.id for result in found for tokens in result.tokens.values() for token in tokens]


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[int]:
    """The answer of a single rank that reads everything."""
    rank = Rank(make_spec(0, config))
    rank.load()
    rank.join(Join(1, 0, "", 0, ("here",)))
    rank.execute(read(1, 1, Run(0, 0, 90, tuple(range(6)))))
    found = [rank.execute(plan) for plan in questions(1, 2)]
    rank.close()
    return [token.id for result in found if result for tokens in result.tokens.values() for token in tokens]


def saved(members: Members) -> list[Saved]:
    """Two members read a document and save it."""
    readies = members.form(1, [0, 1])
    assert readies[0].form == readies[1].form != ""
    members.tell([0, 1], read(1, 1, *PIECES))
    for member in (0, 1):
        members.say(member, Save(3, f"part-{member}", 0, PARTS[member]))
    assert members.hear(StepResult, 0).has_finite_keys
    found = [members.hear(Saved, member) for member in (0, 1)]
    assert [one.failure for one in found] == [None, None]
    return found


def fetch(members: Members, member: int, ticket: int, part: int, found: Saved) -> None:
    ranges = tuple((run.start, run.end) for run in PARTS[part])
    members.say(member, Fetch(ticket, f"part-{part}", found.num_bytes, found.digest, ranges))
    assert members.hear(Fetched, member) == Fetched(member, ticket)


def test_other_members_restore_saved_segments(members: Members, expected: list[int]) -> None:
    """Into other blocks, under another segment id, as other ranks, and then on a single rank."""
    parts = saved(members)
    assert answer(members, [0, 1], 1, 2) == expected
    members.form(2, [1, 0], KvLayout(2, ()))
    fetch(members, 0, 1, 0, parts[0])
    fetch(members, 0, 2, 1, parts[1])
    fetch(members, 1, 2, 1, parts[1])
    portions = (
        RestorePortion(1, (Run(1, 0, 48, (8, 11, 3)),)),
        RestorePortion(2, (Run(1, 48, 64, (1,)), Run(1, 80, 90, (7,)))),
        RestorePortion(2, (Run(0, 64, 80, (1,)),)),
    )
    members.tell([1, 0], StepPlan(2, 1, Restore(4, 0, portions)))
    assert members.hear(StepResult, 1).step == 1
    assert answer(members, [1, 0], 2, 2, segment=4) == expected
    members.form(3, [0], KvLayout(3, ()))
    portions = (RestorePortion(1, (Run(0, 0, 48, (20, 21, 22)),)), RestorePortion(2, (Run(0, 48, 90, (1, 2, 3)),)))
    members.tell([0], StepPlan(3, 1, Restore(6, 0, portions)))
    assert members.hear(StepResult, 0).step == 1
    assert answer(members, [0], 3, 2, segment=6) == expected


def test_discarded_snapshot_ends_the_epoch_of_its_reader(members: Members) -> None:
    parts = saved(members)
    fetch(members, 1, 9, 0, parts[0])
    members.say(1, Discard((9,)))
    members.tell([0, 1], StepPlan(1, 2, Restore(4, 0, (RestorePortion(9, (Run(1, 0, 48, (8, 11, 3)),)),))))
    for member in (0, 1):
        broken = members.broken(member)
        assert (broken.step, broken.blamed) == (2, None)
        assert "PieceNotFetched: rank 1 has no fetched piece for ticket 9" in broken.reason


def test_slow_storage_delays_no_step_heartbeat_or_epoch(members: Members, storage: Path, expected: list[int]) -> None:
    parts = saved(members)
    os.mkfifo(gate := storage / "gate")
    members.say(1, Save(4, "again", 0, PARTS[1]))
    assert answer(members, [0, 1], 1, 2) == expected
    members.wait_for_step(1, 1, 1 + NUM_TOKENS)
    while not (storage / "waiting").exists():  # a request that has not started is dropped with its epoch
        time.sleep(0.01)
    members.form(2, [1], KvLayout(2, ()))
    members.say(1, Save(5, "gone", 0, PARTS[1]))
    dropped = members.hear(Saved, 1)
    assert (dropped.ticket, dropped.failure and dropped.failure.kind) == (5, "dropped")
    opened = os.open(gate, os.O_WRONLY)
    assert members.hear(Saved, 1) == Saved(1, 4, parts[1].num_bytes, parts[1].digest)
    os.close(opened)
    gate.unlink()
    assert FolderStore(str(storage)).get("again", parts[1].digest)


def test_members_respond_while_blocked_in_a_step(members: Members, storage: Path) -> None:
    """One waits in a step for the other, which has not started it."""
    parts = saved(members)
    os.mkfifo(gate := storage / "gate")
    ranges = tuple((run.start, run.end) for run in PARTS[1])
    members.say(0, Fetch(8, "part-1", parts[1].num_bytes, parts[1].digest, ranges))
    members.say(0, Save(9, "again", 0, PARTS[0]))
    plan = questions(1, 2)[0]
    members.say(0, plan)
    members.wait_for_step(0, 1, 2)
    opened = os.open(gate, os.O_WRONLY)
    assert members.hear(Fetched, 0) == Fetched(0, 8)
    assert members.hear(Saved, 0).digest == parts[0].digest
    os.close(opened)
    assert members.wait_for_beat(0).progress.step == 2
    members.say(1, plan)
    assert members.hear(StepResult, 0).step == 2
