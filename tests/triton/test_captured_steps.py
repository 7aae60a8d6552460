"""Decode steps over memory at fixed addresses: each is captured once, and serves any plan of a scheduler with the same
bits as in eager mode.
"""

import asyncio

import pytest

from coordinator.engine.engine import Engine
from coordinator.kv_cache import positions
from tests.support.accelerator.captured import DeviceRank
from tests.support.accelerator.drive import Drive, fleets, small_checkpoints
from tests.support.accelerator.reference_kernels import ReferenceLauncher
from tests.support.fakes.cuda_graphs import RecordedGraphs
from tests.support.golden.asking import answer
from tests.support.golden.interpreted import Launches
from tests.support.golden.knowing import KnowingDrafter
from tests.support.golden.plain import ask_plain
from tests.support.golden.short import SETTINGS, STATES, parted
from tests.support.running import running
from tests.support.threads import ThreadRanks, config_for
from zoo.families import FAMILIES

NUM_STEPS, NUM_DRAFTED = 200, 20
TOLERANCES = {"llama": 1e-4, "windows": 1e-4, "int8": 1e-3, "latents": 0.1}
"""Of a logit, in standard deviations: the last ones are in bfloat16, which the interpreter cuts off."""
CASES = {
    "llama": ("llama", {}),
    "two ranks": ("llama", {"world_size": 2, "merge": "gather"}),
    "windows": ("gemma3", {"world_size": 2}),
    "replicated windows": ("gemma3", {"world_size": 2, "window_keys": "replicated"}),
    "int8": ("llama", {"kv_dtype": "int8"}),
    "int8 windows": ("gemma3", {"kv_dtype": "int8"}),
    "int8, two ranks": ("gemma3", {"kv_dtype": "int8", "world_size": 2, "window_keys": "replicated"}),
    "latents": ("deepseek_v3", {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return small_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def drive(folder, settings, launcher, num_steps, seed):
    made = Drive(*fleets(folder, settings, launcher, launcher), seed)
    assert made.captured.num_captured == made.captured.num_works
    assert not made.eager.num_captured
    made.run(num_steps)
    return made


def check(made):
    """Cases that random steps must have covered."""
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


DRAFTED = ("llama", "two ranks", "int8 windows")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "found") for case in DRAFTED),
        *(pytest.param(case, "found", marks=pytest.mark.slow) for case in CASES if case not in DRAFTED),
        pytest.param("llama", "anything", marks=pytest.mark.slow),
    ],
)
def test_steps_with_drafts_are_replayed(case, kind, folder_of):
    family, settings = CASES[case]
    launcher = ReferenceLauncher()
    made = Drive(*fleets(folder_of(family), {**settings, "max_draft_tokens": 3}, launcher, launcher), 3, drafts=kind)
    made.run(NUM_STEPS)
    assert made.seen["refused"] > 9
    assert kind != "found" or made.seen["accepted"] > 9


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


async def check_golden(short, state, **settings):
    """Greedy tokens of captured steps are those of `generate`."""

    def make(spec):
        return DeviceRank(spec, RecordedGraphs(), ReferenceLauncher())

    config = config_for(short.folder, **{**SETTINGS, "merge": "exchange", "max_sequences": 4, **settings})
    engine = Engine(ThreadRanks(config, make_rank=make), config, max_positions=8192)
    async with running(engine):
        output = await state(engine, short)
    assert [tokens for _, tokens in output] == [golden.tokens for golden, _ in output]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("family", "world_size"), [("llama", 2), ("gemma2", 1), ("gemma3", 2), ("gemma3", 1)])
async def test_tokens_equal_generate(shorts, family, world_size, state):
    await check_golden(shorts(family), STATES[state], world_size=world_size)


@pytest.mark.parametrize(
    ("family", "world_size"), [("llama", 2), ("gemma3", 1), pytest.param("deepseek_v3", 2, marks=pytest.mark.slow)]
)
async def test_tokens_equal_generate_with_drafts(shorts, family, world_size, monkeypatch):
    short = shorts(family)
    golden, _ = ask_plain(short.folder, short.goldens[0].prompt, NUM_DRAFTED)
    drafter = KnowingDrafter(16, [golden.tokens], 0.7)
    monkeypatch.setattr("coordinator.scheduling.scheduler.Drafter", lambda *_: drafter)

    async def several(engine, short):
        return await asyncio.gather(*(say_long(engine, golden) for _ in range(3)))

    async def say_long(engine, golden):
        return golden, await answer(engine, golden.prompt, None, NUM_DRAFTED)

    await check_golden(short, several, world_size=world_size, block_size=16)
    assert drafter.num_right
    assert drafter.num_wrong


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
async def test_tokens_equal_generate_with_replicated_windows(shorts, family):
    await check_golden(shorts(family), parted, world_size=2, window_keys="replicated")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_generate_in_the_full_product(shorts, family, state, world_size):
    await check_golden(shorts(family), STATES[state], world_size=world_size)
