"""Models with recurrent states beside attention: greedy text equals transformers' `generate` token for token."""

import asyncio
import itertools
import os
import signal

import pytest
import torch

from coordinator.auth.quotas import UNLIMITED
from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.replacement_supervisor import ReplacementSupervisor
from coordinator.engine_messages import Prompt, SchedulingParams, Tokens
from coordinator.handlers.context_forks import ContextForks
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.verdict import judge
from longleaf.sampling import SamplingParams
from longleaf.types import ForkContext
from tests.support.golden.asking import MAX_TOKENS, answer, ask, compare, ingest
from tests.support.golden.epochs import Service
from tests.support.golden.plain import LOGIT_TOLERANCE, NEW_TOKENS
from tests.support.golden.rounding import plain_logits, ratio, served_logits
from tests.support.golden.states import AT_ENDS, CONTEXT_LEN, Logits, running
from tests.support.running import running_on
from tests.support.thinned import thinned
from tests.support.threads import config_for
from workers.__main__ import main
from zoo.families import HYBRIDS

WORLD_SIZES = (1, 2, 3)
CHUNK_SIZES = (64, 300, 4096)
EVERY_WAY = list(itertools.product(WORLD_SIZES, CHUNK_SIZES, AT_ENDS))
COVER = [(family, *EVERY_WAY[(7 * i) % len(EVERY_WAY)]) for i, family in enumerate(HYBRIDS * 3)]
"""Every family three times."""
STATE_BYTES = {"qwen3_next": 40_000, "lfm2": 1_600}
"""A little more than a state of the family has."""
QUICK = ("qwen3_next", "lfm2")
"""Families for tests that need not run on all of them."""


async def check_row(golden, world_size, chunk_size, state, **settings):
    logits = Logits()
    config = config_for(golden.folder, world_size=world_size, chunk_size=chunk_size, **settings)
    async with running(config, logits.watch) as engine:
        answers = await AT_ENDS[state](engine, golden.prompt)
    assert answers == [golden.tokens] * len(answers)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "world_size", "chunk_size", "state"), thinned(COVER, 2 * len(HYBRIDS)))
async def test_tokens_equal_generate(goldens, family, world_size, chunk_size, state):
    await check_row(goldens(family), world_size, chunk_size, state)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "chunk_size", "state"), EVERY_WAY)
@pytest.mark.parametrize("family", HYBRIDS)
async def test_tokens_equal_generate_in_the_full_product(goldens, family, world_size, chunk_size, state):
    await check_row(goldens(family), world_size, chunk_size, state)


@pytest.mark.extended
@pytest.mark.parametrize("family", HYBRIDS)
async def test_tokens_equal_generate_with_sharded_weights(goldens, family):
    await check_row(goldens(family), 2, 300, "forked", weights="sharded")


def prepared(golden, world_size=2, **settings):
    """A service of two segments, whose states are at positions 350 and 700."""
    config = config_for(golden.folder, world_size=world_size, block_size=32, kv_bytes=8 << 20, **settings)
    service = Service(config)
    service.ingest(1, (), golden.prompt[:350], 0, 128)
    service.ingest(2, (1,), golden.prompt[350:700], 350, 128)
    return service


def slot_of(service, number):
    run = service.segments[number].window_runs[-1]
    assert (run.rank, len(run), run.end) == (EVERY_RANK, 1, service.segments[number].end)
    return run.blocks[0]


def states_of(member, slot):
    """The parts of a state, by name."""
    return {part.name: part.tensor[:, slot] for part in member.pool.blocks(of_windows=True)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_that_is_lost_is_noticed(goldens, family):
    """The tests above can fail: with one state of one layer zeroed, the logits change. All ranks hold the same bits."""
    golden = goldens(family)
    service, new = prepared(golden), 8
    slot = slot_of(service, 2)
    first, second = (states_of(member, slot) for member in service.members)
    assert all(torch.equal(first[name], second[name]) for name in first)
    tokens, logits = service.ask((1, 2), golden.prompt[700:], 700, new)
    assert tokens == golden.tokens[:new]
    for state in (first, second):
        layer = next(iter(state)).partition(".")[0]
        for name, part in state.items():
            if name.startswith(f"{layer}."):
                part.zero_()
    _, spoiled = service.ask((1, 2), golden.prompt[700:], 700, new)
    assert (spoiled[0] - logits[0]).abs().max() > 10 * LOGIT_TOLERANCE * logits.std()


def test_a_missing_state_is_an_error(goldens):
    """Keys without a state are never answered from."""
    service = prepared(goldens("lfm2"), world_size=1)
    service.segments[2].window_runs = ()
    service.enter(service.alive)
    with pytest.raises(ValueError, match="no recurrent state is held at position 700"):
        service.ask((1, 2), goldens("lfm2").prompt[700:], 700, 1)


@pytest.mark.extended
@pytest.mark.parametrize(("family", "world_size"), [("qwen3_next", 2), ("falcon_h1", 3), ("jamba", 1)])
async def test_samples_and_reused_prompts_answer_like_generate(goldens, family, world_size):
    """A prompt is found again as far as a state is kept: before its last two tokens."""
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=world_size, chunk_size=300)) as engine:
        assert await ask(engine, golden.prompt, num_samples=3) == ([golden.tokens] * 3, 0)
        assert await ask(engine, golden.prompt) == ([golden.tokens], 998)
        assert (await ask(engine, golden.prompt[:500] + golden.prompt[:9]))[1] == 0
        others = [answer(engine, golden.prompt[: 90 * i]) for i in range(1, 5)]
        first, *_, last = await asyncio.gather(answer(engine, golden.prompt), *others, answer(engine, golden.prompt))
    assert first == last == golden.tokens


@pytest.mark.extended
@pytest.mark.parametrize("family", QUICK)
async def test_a_preempted_answer_continues_as_it_began(goldens, family):
    """One generation runs at a time, and one of a higher priority takes its turn in the middle."""
    golden = goldens(family)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
    async with running(config_for(golden.folder, world_size=2, max_sequences=1, chunk_size=300)) as engine:
        output, urgent = [], []
        low, high = SchedulingParams(priority=-1), SchedulingParams(priority=1)
        async for event in engine.submit(
            Prompt(context=None, token_ids=golden.prompt, sampling=sampling, scheduling=low)
        ):
            output += event.token_ids if isinstance(event, Tokens) else ()
            if output and not urgent:
                prompt = Prompt(context=None, token_ids=(5, 6, 7), sampling=sampling, scheduling=high)
                urgent.append(engine.submit(prompt))
        assert any([isinstance(event, Tokens) async for event in urgent[0]])
    assert tuple(output) == golden.tokens


async def fill(engine, document):
    for number in range(100):
        await ingest(engine, f"book {number}", document)


@pytest.mark.extended
@pytest.mark.parametrize("family", QUICK)
async def test_a_context_without_room_for_its_state_is_refused(goldens, family):
    """Each context ends with a state: as many fit as the pool has, beside those of a generation."""
    golden = goldens(family)
    async with running(config_for(golden.folder, max_sequences=1, state_bytes=12 * STATE_BYTES[family])) as engine:
        with pytest.raises(ResourceExhausted, match="recurrent states are needed, and contexts use too many of"):
            await fill(engine, golden.prompt[:40])
        for number in range(4):  # a document of several chunks, and a generation, need two states each
            await engine.delete_context(f"book {number}")
        await ingest(engine, "other", golden.prompt[:CONTEXT_LEN])
        assert await answer(engine, golden.prompt[CONTEXT_LEN:], "other") == golden.tokens


async def test_forks_within_a_segment_and_hidden_tokens_are_refused(goldens):
    golden = goldens("lfm2")
    async with running(config_for(golden.folder, world_size=2)) as engine:
        await ingest(engine, "book", golden.prompt)
        with pytest.raises(InvalidArgument, match="a model with recurrent states.*nearest at"):
            await engine.fork_context("book", "fork", 500)
        fork = await ContextForks(engine, UNLIMITED).fork(ForkContext("book", "fork", 500, recompute=True))
        assert (fork.tokens, fork.recomputed_tokens) == (500, 500)
        assert await answer(engine, golden.prompt[500:], "fork") == golden.tokens
        sampling = SamplingParams(max_tokens=1)
        with pytest.raises(InvalidArgument, match="tokens cannot be hidden"):
            engine.submit(Prompt(context="book", token_ids=(5,), sampling=sampling, hidden=((3, 9),)))


@pytest.mark.extended
@pytest.mark.parametrize("family", HYBRIDS)
async def test_verification_passes(goldens, family):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=2, chunk_size=200)) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert (found.failure, found.compared_tokens, found.equal_tokens) == ("", MAX_TOKENS, MAX_TOKENS)
    assert judge(found).passed


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_next", "bfloat16"), ("falcon_h1", "float16"), ("jamba", "bfloat16")]
)
async def test_half_precision_stays_close_to_the_plain_model(goldens, family, dtype):
    golden = goldens(family)
    exact, plain = plain_logits(golden), plain_logits(golden, dtype)
    assert ratio(golden, await served_logits(golden, world_size=2, dtype=dtype), plain, exact) <= 2


@pytest.mark.timeout(240)
@pytest.mark.extended
@pytest.mark.parametrize(("family", "lost"), [("qwen3_next", 0), ("nemotron_h", 2), ("lfm2", 1)])
async def test_an_answer_continues_after_a_loss(goldens, family, lost):
    """Survivors have all states; the keys of the lost rank are recomputed from the nearest one that is kept. The
    replacement receives the states before it computes.
    """
    golden = goldens(family)
    config = config_for(golden.folder, world_size=3, chunk_size=300, verify_model=False)
    fleet = LocalFleet(main)
    control = RankManager(config, await fleet.reserve(config), fleet.kill)
    async with running_on(fleet, control, config, max_positions=8192) as found:
        for start, end in ((0, 411), (411, CONTEXT_LEN)):
            await ingest(found.engine, "book", golden.prompt[start:end])
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
        prompt, tokens = Prompt(context="book", token_ids=golden.prompt[CONTEXT_LEN:], sampling=sampling), list[int]()
        async for event in found.engine.submit(prompt):
            if isinstance(event, Tokens):
                if not tokens:
                    os.kill(control.hellos[lost].pid, signal.SIGKILL)
                tokens += event.token_ids
        assert tuple(tokens) == golden.tokens
        assert (control.num_lost, len(control.group.members)) == (1, 2)
        assert await answer(found.engine, golden.prompt[CONTEXT_LEN:], "book") == golden.tokens
        supervisor = ReplacementSupervisor(control.registry, fleet, config, found.readies)
        await control.registry.wait_until(lambda: len(control.group.members) == 3)
        assert await answer(found.engine, golden.prompt[CONTEXT_LEN:], "book") == golden.tokens
        await found.engine.fork_context("book", "branch", 411)
        assert await answer(found.engine, golden.prompt[411:], "branch") == golden.tokens
        await supervisor.close()
