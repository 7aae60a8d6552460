"""Drafts that are verified change nothing but the number of steps: tokens, logprobs and keys are those without."""

import itertools

import pytest
import torch

from longleaf.merge import MERGES
from longleaf.rank_protocol.verdict import judge
from longleaf.runs import until
from longleaf.sampling import SamplingParams
from tests.support.golden.drafted import SAMPLINGS, Drafting, guess, never, refuse, slots_of
from tests.support.golden.epochs import Service, wipe
from tests.support.golden.plain import LOGIT_TOLERANCE
from tests.support.thinned import thinned
from tests.support.threads import config_for
from workers.sampling.device_sampler import DeviceSampler
from workers.step.last_tokens import DeviceIds

CUT, START, NEW, MOST = 310, 460, 24, 7
"""Where the second segment branches off the first one, where questions begin, tokens of an answer, and drafts of a step
at most.
"""
KEY_TOLERANCE = 4e-5
"""Largest difference of a stored number, as a share of the largest such number of its layer. Drafts add rows to a step,
and few and many rows are multiplied with the weights by different kernels; gpt_neox magnifies their rounding most."""
SHARES = {"right": 1.0, "wrong": 0.0, "random": 0.7}
FAMILIES = ("llama", "gemma3", "deepseek_v3", "llama4", "gpt_oss", "gemma2", "mistral", "gpt_neox", "cohere2")
"""Full reach, windows, latents, sections, sinks, soft caps, only windows."""
WAYS = list(itertools.product((2, 1, 3), ("random", "wrong", "right")))
COVER = [(family, *WAYS[i % len(WAYS)]) for i, family in enumerate(FAMILIES)]
EVERY = [*COVER, *(row for row in ((f, *way) for f in FAMILIES for way in WAYS) if row not in COVER)]
MERGED = [(merge, kind) for turn in range(3) for i, merge in enumerate(MERGES) for kind in [[*SHARES][(turn + i) % 3]]]
WINDOWED = [("gemma3", 2, "random"), ("llama4", 1, "random"), ("mistral", 3, "wrong"), ("gpt_oss", 2, "right")]


def drafting_of(golden, world_size, draft, *, on_device=False, **settings):
    settings = {"block_size": 16, "merge": "gather", "kv_bytes": 8 << 20, **settings}
    service = Service(config_for(golden.folder, world_size=world_size, **settings))
    for rank in service.members if on_device else ():
        rank.sampler, rank.last_ids = DeviceSampler("cpu", 16), DeviceIds(16, "cpu")
    is_cut_at_ends = service.window_size == 1 or settings.get("window_keys") == "replicated"
    wrong = () if is_cut_at_ends else golden.prompt[: 90 + CUT][::-1][:90]
    service.ingest(0, (), golden.prompt[:CUT] + wrong, 0, 200)
    service.ingest(1, (0,), golden.prompt[CUT:START], CUT, 128)
    return Drafting(service, draft)


def answer(golden, world_size, draft, **settings):
    """Sequences of all samplings with a maximum of sharing, answered together."""
    drafting = drafting_of(golden, world_size, draft, **settings)
    rows = [
        drafting.ask((0, 1), golden.prompt[START + i : START + 9 + 3 * i], START, sampling)
        for i, sampling in enumerate(SAMPLINGS)
    ]
    rows.append(drafting.ask((0,), golden.prompt[START : START + 5], CUT, SAMPLINGS[1]))
    return drafting, drafting.answer(rows, NEW)


def check_same(found, wanted, golden):
    """Compares tokens and logprobs, and the keys of accepted tokens."""
    for mine, theirs in zip(found.outputs, wanted.outputs, strict=True):
        assert [token.id for token in mine] == [token.id for token in theirs]
        logprobs = torch.tensor([[token.logprobs.logprob for token in tokens] for tokens in (mine, theirs)])
        assert (logprobs[0] - logprobs[1]).abs().max() <= 2 * LOGIT_TOLERANCE * golden.logits_TV.std()
    for sequence in range(len(found.sequences)):
        keys = wanted.keys(sequence)
        for place, retained in found.keys(sequence).items():
            assert retained.shape == keys[place].shape
            if retained.numel():
                assert (retained - keys[place]).abs().max() <= KEY_TOLERANCE * keys[place].abs().max(), (
                    sequence,
                    place,
                )


def compare(golden, world_size, kind, **settings):
    wanted, answers = answer(golden, world_size, never, **settings)
    found, _ = answer(golden, world_size, guess(answers, MOST, SHARES[kind]), **settings)
    check_same(found, wanted, golden)
    assert wanted.num_steps == NEW
    assert (found.num_steps == NEW) == (kind == "wrong")
    assert (found.num_refused > 0) == (kind != "right")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "world_size", "kind"), thinned(EVERY, len(COVER)))
def test_answers_and_keys_are_those_without_drafts(goldens, family, world_size, kind):
    compare(goldens(family), world_size, kind)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "world_size", "kind"), WINDOWED)
def test_replicated_windows_forget_what_was_refused(goldens, family, world_size, kind):
    compare(goldens(family), world_size, kind, window_keys="replicated")


REFUSED = [(count, number) for count in (1, 2, 3) for number in range(count + 1)]
"""Numbers of drafts in each step, and the number of the refused one, if there is one."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "world_size"),
    [("lfm2", 1), ("qwen3_next", 2), ("granitemoehybrid", 1), ("kimi_linear", 2), ("nemotron_h", 1), ("jamba", 3)],
)
def test_recurrent_states_are_those_without_drafts(goldens, family, world_size):
    golden = goldens(family)
    wanted, answers = answer_one(golden, world_size, never)
    states = wanted.states(0)
    for count, number in REFUSED:
        found, _ = answer_one(golden, world_size, refuse(answers, count, number))
        check_same(found, wanted, golden)
        assert (found.num_refused > 0) == (number < count)
        for (rank, part), state in found.states(0).items():
            difference = (state - states[rank, part]).abs().max()
            assert difference <= KEY_TOLERANCE * states[rank, part].abs().max()
            assert torch.equal(state, found.states(0)[0, part]), "all ranks have the same bits"


def answer_one(golden, world_size, draft):
    """A single sequence, after a short context."""
    service = Service(config_for(golden.folder, world_size=world_size, block_size=16, merge="gather", kv_bytes=8 << 20))
    service.ingest(0, (), golden.prompt[:40], 0, 40)
    drafting = Drafting(service, draft)
    row = drafting.ask((0,), golden.prompt[40:49], 40, SAMPLINGS[0])
    return drafting, drafting.answer([row], 10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("merge", "kind"), thinned(MERGED, len(MERGES)))
def test_drafts_are_verified_with_every_merge(goldens, merge, kind):
    compare(goldens("llama"), 3, kind, merge=merge)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world_size", "kind"), [(1, "random"), (3, "wrong"), (2, "right")])
def test_drafts_are_accepted_on_a_device_as_on_a_cpu(goldens, world_size, kind):
    golden = goldens("llama")
    wanted, answers = answer(golden, world_size, never)
    found, _ = answer(golden, world_size, guess(answers, MOST, SHARES[kind]), on_device=True)
    check_same(found, wanted, golden)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world_size", "kind"), [(1, "right"), (2, "random"), (3, "wrong")])
def test_what_was_accepted_is_compared_with_plain_attention(goldens, world_size, kind):
    golden, found = goldens("llama"), []
    for draft in (never, guess([golden.tokens], MOST, SHARES[kind])):
        drafting = drafting_of(golden, world_size, draft)
        row = drafting.ask((0, 1), golden.prompt[START:], START, SamplingParams(), before=golden.prompt[:START])
        assert drafting.answer([row], NEW) == [golden.tokens[:NEW]]
        assert [len(result.comparisons) for result in drafting.results] == [0] * (drafting.num_steps - 1) + [1]
        found += drafting.results[-1].comparisons.values()
    for comparison in found:
        assert (comparison.failure, comparison.compared_tokens, comparison.equal_tokens) == ("", NEW, NEW)
        assert comparison.holding_ranks == world_size
        assert judge(comparison).passed


class Stores:
    """The arguments of a rank's stores, step by step."""

    def __init__(self, drafting, rank):
        self._drafting, self._rank = drafting, rank
        self._steps = {}
        self._store = rank.pool.store
        rank.pool.store = self._note

    def _note(self, backend, layer, *stored):
        self._steps.setdefault((self._drafting.num_steps + 1, layer), stored)
        self._store(backend, layer, *stored)

    def again(self, number):
        """Stores only the accepted tokens again, one by one."""
        pool, backend = self._rank.pool, self._rank.backend
        for step, row, end in self._drafting.accepted:
            own = [until(run, end, pool.block_size) for run in row.runs if run.rank == number]
            slots = slots_of([run for run in own if len(run) > 0], pool.block_size, row.start)
            for layer in self._rank.model.layers:
                slots_T, k_KTD, v_KTD = self._steps[step, layer]
                for i in (slots_T.tolist().index(slot) for slot in slots):
                    self._store(backend, layer, slots_T[i : i + 1], k_KTD[:, i : i + 1], v_KTD[:, i : i + 1])
        return pool


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "world_size", "kind"), [("llama", 2, "random"), ("gemma2", 1, "wrong"), ("llama", 1, "right")]
)
def test_in_8_bits_blocks_hold_what_was_accepted_and_no_trace_of_the_rest(goldens, family, world_size, kind):
    golden, share = goldens(family), SHARES[kind]
    _, answers = answer(golden, world_size, never, kv_dtype="int8")
    drafting = drafting_of(golden, world_size, guess(answers, MOST, share), kv_dtype="int8")
    stores = [Stores(drafting, rank) for rank in drafting.ranks]
    rows = [drafting.ask((0, 1), golden.prompt[START + i : START + 5 + i], START, s) for i, s in enumerate(SAMPLINGS)]
    drafting.answer(rows, NEW)
    assert drafting.num_refused > 0 or kind == "right"
    found = [drafting.blocks(number) for number in range(world_size)]
    for number, store in enumerate(stores):
        wipe(drafting.ranks[number].pool)
        store.again(number)
        for mine, theirs in zip(found[number], drafting.blocks(number), strict=True):
            assert torch.equal(mine, theirs)
