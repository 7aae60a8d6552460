"""Decode steps over memory of fixed address: captured once, each serves whatever a scheduler plans, to the same bits as
when it is launched as it comes."""

import random
from collections import Counter
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from coordinator.engine.engine import Engine
from coordinator.placement import positions
from longleaf.channel.fakes import VOCAB
from longleaf.channel.step import Decode, StepPlan, StepResult
from longleaf.errors import LongleafError
from longleaf.geometry import Rope
from longleaf.sampling import Sampling
from tests.support.accelerator import captured as captured_ranks
from tests.support.accelerator.captured import DeviceFleet, DeviceRank
from tests.support.accelerator.reference_kernels import ReferenceLauncher
from tests.support.golden.interpreted import Launches
from tests.support.golden.short import SETTINGS, STATES, make_short, parted, shorten
from tests.support.running import running
from tests.support.scheduling import Bench
from tests.support.threads import ThreadRanks, config_for
from workers.decode.fakes import RecordedGraphs, Recording
from workers.decode.graphs import CaptureRefused
from workers.sampling.fixed_shape import Needs
from workers.step.last_ids import HostIds
from zoo.checkpoints import make_checkpoint
from zoo.families import FAMILIES

SAMPLINGS = (
    Sampling(),
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.7, top_p=0.9, num_logprobs=3, seed=2),
    Sampling(temperature=1.0, top_k=20, min_p=0.02, repetition_penalty=1.2, seed=3),
    Sampling(presence_penalty=0.5, frequency_penalty=0.2, logit_bias={5: 2.0}),
    Sampling(num_logprobs=0),
)
SIZES = {"chunk_size": 8, "block_size": 4, "replicate_below": 6, "max_sequences": 6, "merge": "exchange"}
NUM_STEPS = 200
TOLERANCES = {"llama": 1e-4, "windows": 1e-4, "int8": 1e-3, "latents": 0.1}
"""Of a logit, in standard deviations: the last ones are in bfloat16, which the interpreter cuts off."""
CASES = {
    "llama": ("llama", {}),
    "two ranks": ("llama", {"world_size": 2, "merge": "gather"}),
    "windows": ("gemma3", {"world_size": 2}),
    "replicated windows": ("gemma3", {"world_size": 2, "window_keys": "replicated"}),
    "int8": ("llama", {"kv_dtype": "int8"}),
    "int8 windows": ("gemma3", {"kv_dtype": "int8"}),
    "latents": ("deepseek_v3", {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_checkpoint(
                tmp_path_factory.mktemp(family), family, num_layers=2, hidden=32, vocab_size=VOCAB
            )
            shorten(made[family] / "config.json")
        return made[family]

    return get


class Drive:
    """A scheduler to which clients come at random; each plan is done by two fleets, and what they answer is compared.

    One of them does a step at a time; the other begins the next one before it is asked for the last one's tokens.
    """

    def __init__(self, eager: DeviceFleet, captured: DeviceFleet, seed: int) -> None:
        self.eager, self.captured = eager, captured
        self.dice = random.Random(seed)
        ready, config = eager.readies[0], eager.config
        self.bench = Bench(
            blocks=tuple(found.num_blocks for found in eager.readies),
            max_positions=80,
            windows=ready.windows,
            rotary=ready.rotary if config.allow_long else None,
            allow_long=config.allow_long,
            model=config.model,
            world_size=config.world_size,
            window_keys=config.window_keys,
            **{
                name: getattr(config, name) for name in ("chunk_size", "block_size", "replicate_below", "max_sequences")
            },
        )
        self.seen = Counter[str]()
        self._num_contexts = 0
        self._under_way: list[tuple[StepPlan, StepResult]] = []
        self._pending: list = []
        self._ropes: dict[int, Rope] = {}

    def run(self, num_steps: int) -> None:
        while self.seen["decode"] < num_steps:
            if self.dice.random() < 0.35:
                with suppress(LongleafError):
                    self._act()
            plan = self.bench.schedule() if len(self._under_way) < 2 else None
            if plan is not None:
                self._begin(plan)
            elif self._under_way:
                self._commit()
        while self._under_way:
            self._commit()

    def _act(self) -> None:
        """What a client does."""
        contexts = [context.id for context in self.bench.scheduler.contexts.list("", None)]
        context = self.dice.choice([None, *contexts])
        match self.dice.choice(("ask", "ask", "ask", "several", "ingest", "fork", "cancel", "delete")):
            case "ask" | "several" as what:
                num_samples = self.dice.choice((2, 3)) if what == "several" else 1
                count, num_new = self.dice.randint(1, 12), self.dice.randint(1, 12)
                sampling = self.dice.choice(SAMPLINGS)
                self.bench.ask(count, num_new, context, sampling=sampling, num_samples=num_samples)
                self.seen[what] += 1
            case "ingest":
                self._num_contexts += 1
                self.bench.ingest(f"c{self._num_contexts}", self.dice.randint(1, 20))
            case "fork" if context:
                self._num_contexts += 1
                self.bench.scheduler.fork_context(context, f"c{self._num_contexts}")
                self.seen["fork"] += 1
            case "cancel":
                self.bench.scheduler.cancel(self.dice.randrange(max(1, self.bench.num_jobs)))
            case "delete" if len(contexts) > 2 and context:
                self.bench.scheduler.delete_context(context)
            case _:
                pass

    def _begin(self, plan: StepPlan) -> None:
        wanted = self.eager.execute(plan)
        if not plan.may_overlap:
            self._settle()
        else:
            self.seen["ahead"] += bool(self._pending)
        self._pending.append((self.captured.start(plan), wanted, self.eager.logits.clone()))
        self._under_way.append((plan, wanted))
        assert torch.equal(self.captured.logits, self.eager.logits)
        assert self.captured.same_keys(self.eager)
        if len(self._pending) > 1:
            self._check()
        if isinstance(plan.work, Decode):
            self.seen["decode"] += 1
            self.seen["mixed ropes"] += len({row.rope for row in self._whole(plan).work.rows}) > 1
            self.seen[f"{plan.num_tokens} rows"] += 1
            self.seen["after release"] += any(row.terms is not None and row.token_index > 0 for row in plan.work.rows)

    def _whole(self, plan: StepPlan) -> StepPlan:
        """With what is left out because ranks remember it."""
        for row in plan.work.rows:
            if row.path:
                self._ropes[row.sequence] = row.rope
        rows = tuple(replace(row, rope=self._ropes[row.sequence]) for row in plan.work.rows)
        return replace(plan, work=Decode(rows))

    def _settle(self) -> None:
        while self._pending:
            self._check()

    def _check(self) -> None:
        """What was begun first ends as it did there, and says the same."""
        pending, wanted, _ = self._pending.pop(0)
        found, *others = (one.result() for one in pending)
        assert found == wanted
        assert not any(others)

    def _commit(self) -> None:
        plan, _ = self._under_way.pop(0)
        if len(self._pending) > len(self._under_way):
            self._check()
        self.bench.commit(plan)


def fleets(folder, settings, *launchers):
    """Of which the first one is not captured."""
    settings = {**SIZES, "kv_bytes": 24_000, **settings}
    return [DeviceFleet(folder, launcher, is_captured=i > 0, **settings) for i, launcher in enumerate(launchers)]


def drive(folder, settings, launcher, num_steps, seed):
    made = Drive(*fleets(folder, settings, launcher, launcher), seed)
    assert made.captured.num_captured == made.captured.num_works
    assert not made.eager.num_captured
    made.run(num_steps)
    return made


def check(made):
    """What random steps must have had in them."""
    seen = made.seen
    assert seen["ahead"] > seen["decode"] // 2
    assert seen["fork"] and seen["several"] and seen["after release"]
    assert {"1 rows", "2 rows", "3 rows", "5 rows"} <= seen.keys()
    assert seen.keys() & {f"{count} rows" for count in range(9, 30)}, "none went beyond the largest bucket"


@pytest.mark.parametrize("case", ["llama", "windows", "int8 windows"])
def test_replays_of_200_random_steps_are_what_is_launched_as_it_comes(case, folder_of):
    family, settings = CASES[case]
    check(drive(folder_of(family), settings, ReferenceLauncher(), NUM_STEPS, seed=[*CASES].index(case)))


@pytest.mark.parametrize("case", ["two ranks", "replicated windows", "int8", "latents"])
def test_replays_of_some_steps_are_what_is_launched_as_it_comes(case, folder_of):
    family, settings = CASES[case]
    drive(folder_of(family), settings, ReferenceLauncher(), NUM_STEPS // 5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 13))
@pytest.mark.parametrize("case", CASES)
def test_replays_of_many_random_steps_are_what_is_launched_as_it_comes(case, seed, folder_of):
    family, settings = CASES[case]
    check(drive(folder_of(family), settings, ReferenceLauncher(), 2 * NUM_STEPS, seed=seed))


def test_rows_in_float64_and_in_float32_are_replayed_together(folder_of, monkeypatch):
    monkeypatch.setattr(positions, "FLOAT32_POSITIONS", 16)
    made = drive(folder_of("llama"), {"allow_long": True}, ReferenceLauncher(), NUM_STEPS, seed=0)
    assert made.seen["mixed ropes"] > 10


@pytest.mark.parametrize("case", ["llama", *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])])
def test_kernels_of_the_interpreter_are_replayed(case, folder_of):
    family, settings = CASES[case]
    drive(folder_of(family), settings, Launches(), 8 if case == "llama" else 20, seed=1)


@pytest.mark.parametrize("case", ["llama", "windows", "int8", "latents"])
def test_the_kernels_of_these_tests_say_what_those_of_gpus_do(case, folder_of):
    family, settings = CASES[case]
    made = Drive(*fleets(folder_of(family), {**settings, "world_size": 1}, ReferenceLauncher(), ReferenceLauncher()), 2)
    other = fleets(folder_of(family), {**settings, "world_size": 1}, Launches())[0]
    begin = made.captured.start

    def both(plan):
        other.execute(plan)
        spread = float(made.eager.logits.float().std())
        assert float((other.logits.float() - made.eager.logits.float()).abs().max()) < TOLERANCES[case] * spread
        return begin(plan)

    made.captured.start = both
    made.run(4)


def without_room(fleet, number):
    """Tables of the rank have no room for anything."""
    fixed = fleet.ranks[number]._fixed
    for bucket in fixed._buckets:
        for variant in bucket.variants:
            for tables in variant.tables.values():
                tables.fill = lambda *_: None


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_exchange_as_many_rows_where_the_tables_of_one_have_no_room(number, folder_of):
    made = Drive(*fleets(folder_of("llama"), CASES["two ranks"][1], ReferenceLauncher(), ReferenceLauncher()), seed=7)
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
    settings = {**SIZES, "kv_bytes": 24_000, **CASES["two ranks"][1]}
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


def captured(rank):
    works = rank._fixed._works.items()
    return {key for key, work in works if isinstance(getattr(work, "__self__", None), Recording)}


def is_of_rank_0(key):
    return isinstance(key, tuple) and isinstance(key[1], Needs)


def test_no_rank_pads_its_rows_where_another_one_cannot(folder_of):
    def on_host(spec, *others):
        rank = DeviceRank(spec, *others)
        if spec.rank == 1:
            rank.last_ids = HostIds()
        return rank

    settings = {**SIZES, "kv_bytes": 24_000, **CASES["two ranks"][1]}
    with patch.object(captured_ranks, "DeviceRank", on_host):
        fleet = DeviceFleet(folder_of("llama"), ReferenceLauncher(), is_captured=True, **settings)
    assert [rank._fixed for rank in fleet.ranks] == [None, None]


@pytest.fixture(scope="module")
def shorts(tmp_path_factory):
    """What a family's model says, made at first use."""
    folder, made = tmp_path_factory.mktemp("shorts"), {}

    def get(family):
        if family not in made:
            made[family] = make_short(folder / family, family)
        return made[family]

    return get


async def check_golden(short, state, **settings):
    """Greedy tokens of captured steps are those of `generate`."""

    def make(spec):
        return DeviceRank(spec, RecordedGraphs(), ReferenceLauncher())

    config = config_for(short.folder, **{**SETTINGS, "merge": "exchange", "max_sequences": 4, **settings})
    engine = Engine(ThreadRanks(config, make_rank=make), config, max_positions=8192)
    async with running(engine):
        said = await state(engine, short)
    assert [tokens for _, tokens in said] == [golden.tokens for golden, _ in said]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("family", "world_size"), [("llama", 2), ("gemma2", 1), ("gemma3", 2), ("gemma3", 1)])
async def test_tokens_equal_generate(shorts, family, world_size, state):
    await check_golden(shorts(family), STATES[state], world_size=world_size)


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
async def test_tokens_equal_generate_with_replicated_windows(shorts, family):
    await check_golden(shorts(family), parted, world_size=2, window_keys="replicated")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_generate_in_the_full_product(shorts, family, state, world_size):
    await check_golden(shorts(family), STATES[state], world_size=world_size)
