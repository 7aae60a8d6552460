"""Tokens that samplers choose behind drafts are those of steps of one token, from the same logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.sampling.acceptance import NOT_FINITE, NOT_REACHED, accepted_ids
from workers.sampling.device_sampler import DeviceSampler
from workers.sampling.sampler import CpuSampler

V, MOST = 40, 5
KINDS = (
    SamplingParams(),
    SamplingParams(num_logprobs=3),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, seed=4, num_logprobs=0),
    SamplingParams(repetition_penalty=1.5, num_logprobs=1),
    SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, logit_bias={3: 1.0}),
    SamplingParams(temperature=1.2, repetition_penalty=0.7, frequency_penalty=-0.5, seed=5),
)
SEQUENCES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.lists(st.booleans(), max_size=MOST), st.integers(0, 3)), min_size=1, max_size=5
)
"""For each sequence: its sampling, whether each draft is right, and the index of its first token."""
SAMPLERS = {"of a CPU": CpuSampler, "of a device": lambda: DeviceSampler("cpu", 16)}


def logits_of(num_sequences, seed, broken):
    """[S, MOST + 2, V], of which some are not finite."""
    generator = torch.Generator().manual_seed(seed)
    found = 3 * torch.randn(num_sequences, MOST + 2, V, generator=generator)
    for sequence, position in broken:
        if sequence < num_sequences:
            found[sequence, position, position] = torch.nan
    return found


def row(sequence, index, sampling=None, draft_ids=()):
    seen = PenaltyHistory((1, 2, 3), (4, 4)) if sampling and sampling.has_penalties else None
    terms = SamplingTerms(sampling, seen) if sampling else None
    return Row(sequence, (0,), 9, (), (), index, terms, draft_ids=draft_ids)


def step_by_step(sampling, first, logits_PV):
    """Tokens of steps without drafts, up to the first one that has none."""
    sampler, found = CpuSampler(), []
    for turn, logits_V in enumerate(logits_PV):
        [tokens] = sampler.start([row(0, first + turn, None if turn else sampling)], logits_V[None]).tokens()
        if not tokens:
            break
        found += tokens
    return found


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@given(
    drawn=SEQUENCES,
    seed=st.integers(0, 1 << 20),
    broken=st.sets(st.tuples(st.integers(0, 4), st.integers(0, MOST))),
)
@settings(max_examples=150, deadline=None)
def test_tokens_behind_drafts_are_those_of_single_steps(make, drawn, seed, broken):
    logits_SPV = logits_of(len(drawn), seed, broken if seed % 3 == 0 else ())
    wanted = [step_by_step(kind, first, logits_SPV[i]) for i, (kind, _, first) in enumerate(drawn)]
    rows, parts = [], []
    for i, (kind, are_right, first) in enumerate(drawn):
        pairs = zip(wanted[i], are_right, strict=False)  # drafts stop at a step that fails
        rows.append(
            row(i, first, kind, tuple(token.id if is_right else (token.id + 1) % V for token, is_right in pairs))
        )
        parts.append(logits_SPV[i, : 1 + len(rows[-1].draft_ids)])
    sampler = make()
    choice = sampler.start(rows, torch.cat(parts))
    found = choice.tokens()
    for i, (tokens, (_, are_right, _)) in enumerate(zip(found, drawn, strict=True)):
        num_drafts = len(rows[i].draft_ids)
        num_right = [*are_right[:num_drafts], False].index(False)
        check_same(tokens, wanted[i][: 1 + num_right])
    reported = list(accepted_ids(rows, choice.ids().tolist()))
    assert reported == [[token.id for token in tokens] or [NOT_FINITE] for tokens in found]
    assert sum(map(len, reported)) + choice.ids().tolist().count(NOT_REACHED) == len(choice.ids())
    assert sampler.broken == {i for i, tokens in enumerate(wanted) if not tokens}
    left = [
        i for i, tokens in enumerate(found) if 0 < len(tokens) < len(wanted[i])
    ]  # penalties count the accepted tokens
    if left:
        more = sampler.start(
            [row(i, drawn[i][2] + len(found[i])) for i in left],
            torch.stack([logits_SPV[i, len(found[i])] for i in left]),
        )
        for i, tokens in zip(left, more.tokens(), strict=True):
            check_same(tokens, wanted[i][len(found[i]) : len(found[i]) + 1])


def check_same(found, wanted):
    """The order of equally likely tokens is arbitrary; sums may differ in their last bit."""
    assert [token.id for token in found] == [token.id for token in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-12)
            assert len(ours.logprobs.top) == len(theirs.logprobs.top)
