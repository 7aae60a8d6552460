"""Rows sampled together get the same tokens as rows sampled one by one, for any settings."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sampling.one_by_one import History, adjusted
from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.sampling import distribution
from workers.sampling.device_sampler import DeviceSampler
from workers.sampling.sampler import CpuSampler
from workers.sampling.uniforms import uniform

V = 20
ids = st.integers(0, V - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-300, 0.01, 0.5, 1.0, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, V - 1, V, 1000]),
    top_p=st.one_of(st.just(1.0), st.just(0.0), st.floats(0.0, 1.0), st.integers(1, V).map(lambda n: n / V)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.just(0.5)),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 1e-15, 2.0]), max_size=2),
    seed=st.integers(0, 2**64 - 1),
    num_logprobs=st.sampled_from([None, None, 0, 3]),
)
"""Many of them cut where rounding decides: at shares of equal tokens, or of one that is half as likely as another."""
ties = st.sampled_from([-torch.inf, -1.0, 0.0, 0.6931471805599453, 1.0])
logits = st.one_of(
    st.lists(ties, min_size=V, max_size=V),
    st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V),
    st.lists(st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]), min_size=V, max_size=V),
)
seen = st.builds(PenaltyHistory, st.sets(ids, max_size=5).map(tuple), st.lists(ids, max_size=5).map(tuple))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def defined(logits_V: torch.Tensor, sampling: SamplingParams, history: PenaltyHistory, token_index: int) -> int:
    scores_V = adjusted(logits_V, sampling, History(history, V) if sampling.has_penalties else None)
    if sampling.is_greedy:
        return int(scores_V.argmax())
    return distribution.draw(scores_V, sampling, uniform(sampling.seed, token_index))


@given(
    requests=st.lists(st.tuples(samplings, logits, seen), min_size=1, max_size=6), index=st.integers(0, 2), dtype=dtypes
)
@settings(max_examples=200, deadline=None)
def test_rows_drawn_together_are_those_of_the_definition(
    requests: list[tuple[SamplingParams, list[float], PenaltyHistory]], index: int, dtype: torch.dtype
) -> None:
    rows = [
        Row(i, (0,), index, (), (), index, SamplingTerms(sampling, reported if sampling.has_penalties else None))
        for i, (sampling, _, reported) in enumerate(requests)
    ]
    logits_RV = torch.tensor([values for _, values, _ in requests]).to(dtype)
    wanted = [
        defined(logits_V, sampling, reported, index)
        for logits_V, (sampling, _, reported) in zip(logits_RV, requests, strict=True)
    ]
    assert [token.id for token in CpuSampler().choose(rows, logits_RV)] == wanted
    is_finite = logits_RV.amax(dim=-1).isfinite().tolist()
    found = DeviceSampler("cpu", 512).start(rows, logits_RV).tokens()
    assert [[token.id for token in tokens] for tokens in found] == [
        [token_id] if is_right else [] for token_id, is_right in zip(wanted, is_finite, strict=True)
    ]
