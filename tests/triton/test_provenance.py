"""Attribution of rows of small models, on the kernels of GPUs, compared with dense attention in float64."""

import pytest
import torch

from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.rank_protocol.step import Decode, Spans
from tests.support.golden.attended import Dense, expected, unpack_attention
from tests.support.golden.epochs import Service
from tests.support.golden.interpreted import Launches, use_kernels
from tests.support.golden.plain import draw_ids
from tests.support.golden.short import HEADS, SIZES
from tests.support.golden.states import Logits
from tests.support.threads import config_for
from zoo.checkpoints import make_checkpoint

CUT, ASKED, END, SIZE, STEPS = 110, 170, 175, 32, 2
"""Where the second segment branches off the first one, where the question begins and ends, tokens of a span and of an
answer.
"""
PROMPT = draw_ids(END)
NUM_LEAD = 45
"""Ends inside a block."""
TOLERANCE = 2e-5
NUM_MULTIPROCESSORS = 2


@pytest.fixture(autouse=True)
def split_keys(monkeypatch):
    """Programs share these few keys."""
    monkeypatch.setattr("longleaf.kernels.gpu.work_items.MIN_PIECE", 1)


def answered(folder, world_size, spans, **settings):
    """Ranks prefill a context with the kernels of CPUs, and answer with those of GPUs. Returns the attributed shares,
    the tokens and the logits.
    """
    settings = {"block_size": 2 * SIZE, "merge": "gather", "kv_bytes": 1 << 20, **settings}
    service, launches = Service(config_for(folder, world_size=world_size, **settings)), Launches()
    service.ingest(0, (), PROMPT[:CUT] + draw_ids(20, seed=8), 0, 64)
    service.ingest(1, (0,), PROMPT[CUT:ASKED], CUT, 64)
    for member in service.members:
        use_kernels(member, TritonKernels(NUM_MULTIPROCESSORS, launches))
    rows = [
        service.begin((0, 1), PROMPT[ASKED:], ASKED, 0, spans=spans),
        service.begin((0,), PROMPT[:3], CUT, 0),
        service.begin((0, 1), PROMPT[ASKED:], ASKED, 0, spans=spans, hidden=((40, 41), (64, 100))),
    ]
    asking, (logits, rank), results = rows[0].sequence, (Logits(), service.epoch.ranks[0]), []
    logits.watch(0, rank)
    for _ in range(STEPS):
        results.append(service.epoch.execute(Decode(tuple(rows))))
        rows = [service.next_row(row) for row in rows]
    tokens = [result.tokens[asking][0].id for result in results]
    full_layers = service.members[0]._ready.full_layers
    return [result.attention.get(asking) for result in results], tokens, logits.first(STEPS), full_layers, launches


@pytest.mark.parametrize(
    ("family", "world_size", "settings"),
    [
        ("llama", 1, {}),
        ("gpt_oss", 2, {}),
        ("gemma2", 1, {}),
        ("deepseek_v3", 2, {}),
        ("llama", 2, {"kv_dtype": "int8"}),
    ],
)
def test_shares_are_those_of_dense_attention_and_to_ask_changes_no_bit(
    tmp_path, monkeypatch, family, world_size, settings
):
    def never(*_):
        raise AssertionError("keys are looked at again")

    monkeypatch.setattr("workers.step.attention_attribution.AttributionAccumulator._of_layer", never)
    folder = make_checkpoint(tmp_path / family, family, seed=1, **SIZES, **({} if family == "llama" else HEADS))
    spans = Spans(SIZE, 2, END, num_lead=NUM_LEAD)
    *_, plain_tokens, plain_logits, _, _ = answered(folder, world_size, None, **settings)
    found, tokens, logits, full_layers, launches = answered(folder, world_size, spans, **settings)
    assert tokens == plain_tokens and torch.equal(logits, plain_logits)
    assert "add_shares" in launches.names
    _, weights = Dense(folder, full_layers)((*PROMPT, *tokens[:-1]))
    for i, [attention] in enumerate(found):
        shares, wanted = unpack_attention(attention), expected(weights, [END - 1 + i], (0, CUT), ASKED, spans)
        assert abs(float(shares.means.double().sum()) - 1) <= 1e-5
        tolerance = 1e-3 if settings else TOLERANCE  # keys in 8 bits are others
        assert (shares.means - wanted.means).abs().max() <= tolerance
        assert (shares.largest - wanted.largest).abs().max() <= 10 * tolerance
