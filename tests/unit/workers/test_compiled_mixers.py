"""Mixers that compute the rows of steps with compiled kernels, against the modules of transformers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from longleaf.kernels.cpu.recurrent import NativeRecurrence
from longleaf.runs import Run
from tests.support.loopback import loopback
from workers.kv_cache.states import StatePool
from workers.model import compiled_mixers, model
from workers.model.compiled_mixers import compile_mixers
from workers.model.mixers import Projected
from workers.step.states import SequenceRows, StateRows, StateStep
from zoo.checkpoints import make_checkpoint

COMPILED = {
    "qwen3_next": [0, 1, 2],
    "qwen3_5": [0, 1, 2],
    "qwen3_5_moe": [0, 1, 2],
    "olmo_hybrid": [0, 1, 2],
    "kimi_linear": [0, 1, 2],
    "bailing_hybrid": [0, 1, 2],
    "granitemoehybrid": [0, 1, 3],
    "bamba": [0, 3],
    "nemotron_h": [0, 3],
    "falcon_h1": [0, 1, 2, 3],
}
PLAIN = ("lfm2", "jamba")
TOLERANCE = 2e-6
"""Relative to the largest number. Limits of time steps change the results of Nemotron-H by 3e-4."""
ROUNDING = 2e-2
"""The same in bfloat16, in which transformers rounds between the convolution and the recurrence."""


@pytest.fixture(scope="module")
def kernels():
    return NativeRecurrence.load()


def load(folder, family, dtype="float32", **settings):
    return model.load(str(make_checkpoint(folder, family, settings=settings)), dtype, "cpu")


def compile_all(found, kernels):
    """The layers that compute with compiled kernels."""
    compile_mixers(found.mixers.layers, found.module.config.get_text_config().hidden_size, kernels)
    return [layer for layer, mixer in found.mixers.layers.items() if mixer.compiled is not None]


def pool_of(found, generator):
    """A pool of states of the size that they have in a model."""
    pool = StatePool(found.mixers.parts(), 12, found.dtype, "cpu")
    for layer in found.mixers.layers:
        for part in pool.parts(layer).values():
            part.copy_(torch.randn(part.shape, generator=generator) / 4)
    return pool


SEQUENCES = [
    SequenceRows(0, 1, 4, ((1, 7),)),
    SequenceRows(1, 6, None, ((2, 8), (5, 9))),
    SequenceRows(6, 7, 5, ((1, 10),)),
    SequenceRows(7, 12, 6, ()),
    SequenceRows(12, 13, None, ((1, 11),)),
    SequenceRows(13, 17, 6, ((1, 0), (3, 1))),
]
"""Sequences that begin or continue with one row or more, of which some states are stored."""


@torch.inference_mode()
def run(found):
    """The results and the states of the rows of `SEQUENCES` in each mixer."""
    rows_TF = torch.randn(17, 64, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    pool = pool_of(found, torch.Generator().manual_seed(0))
    step = StateStep(StateRows(SEQUENCES), pool, "cpu")
    results = [step.mix(mixer, rows_TF) for mixer in found.mixers.layers.values()]
    return results + [part for layer in found.mixers.layers for part in pool.parts(layer).values()]


def compare(found, wanted, tolerance):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("family", COMPILED)
def test_rows_of_several_sequences_equal_those_of_transformers(tmp_path, kernels, family):
    found = load(tmp_path, family)
    wanted = run(found)
    assert compile_all(found, kernels) == COMPILED[family]
    compare(run(found), wanted, TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "bamba"])
def test_bfloat16_stays_close_to_transformers(tmp_path, kernels, family):
    found = load(tmp_path, family, "bfloat16")
    wanted = run(found)
    assert compile_all(found, kernels) == COMPILED[family]
    compare(run(found), wanted, ROUNDING)


@pytest.mark.parametrize("family", PLAIN)
def test_other_forms_stay_plain(tmp_path, kernels, family, caplog):
    assert compile_all(load(tmp_path, family), kernels) == []
    assert "compiled" not in caplog.text


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float16", {}), ("float32", {"linear_key_head_dim": 12}), ("float32", {"linear_conv_kernel_dim": 9})],
)
def test_other_sizes_and_types_stay_plain(tmp_path, kernels, dtype, settings):
    assert compile_all(load(tmp_path, "qwen3_5", dtype, **settings), kernels) == []


def test_wrong_results_stay_plain(tmp_path, kernels, monkeypatch, caplog):
    """A module with the parts of a known one that computes something else, or has other shapes."""
    rules = {**compiled_mixers.DELTA_RULES}
    (names, project), *_ = rules.items()

    def other(plain, rows_TF):
        gates, (x_TC, decays, steps_TH) = project(plain, rows_TF)
        if plain.layer_idx == 1:
            steps_TH = steps_TH * 1.001
        return Projected(gates, (x_TC[:, :-16] if plain.layer_idx == 2 else x_TC, decays, steps_TH))

    monkeypatch.setitem(compiled_mixers.DELTA_RULES, names, other)
    assert compile_all(load(tmp_path, "qwen3_5"), kernels) == [0]
    assert "layers 1 and 2: results of the compiled kernels differ from those of transformers" in caplog.text


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_ranks_compute_their_pieces_of_a_chunk(tmp_path, kernels, family, transport):
    """A rank may have no piece. The states of all ranks have the same bits. With gloo, rows are gathered before their
    projection.
    """
    found = load(tmp_path, family)
    assert compile_all(found, kernels) == COMPILED[family]
    rows_TF = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    pieces, sequence = [Run(2, 0, 5, ()), Run(0, 5, 12, ())], SequenceRows(0, 12, 4, ((12, 7),))
    mixers = list(found.mixers.layers.values())

    @torch.inference_mode()
    def step_of(rows, hidden_TF, comm):
        pool = pool_of(found, torch.Generator().manual_seed(0))
        step = StateStep(rows, pool, "cpu", comm)
        return [step.mix(mixer, hidden_TF) for mixer in mixers], pool

    def run_rank(comm):
        comm.transport = transport
        piece = next((one for one in pieces if one.rank == comm.rank), Run(comm.rank, 0, 0, ()))
        hidden_TF = torch.full((8, 64), torch.nan)  # rows behind a piece must not matter
        hidden_TF[: len(piece)] = rows_TF[piece.start : piece.end]
        return step_of(StateRows([sequence], pieces), hidden_TF, comm)

    wanted, pool = step_of(StateRows([sequence]), rows_TF, None)
    with ThreadPoolExecutor(3) as threads:
        ranks = list(threads.map(run_rank, loopback(3)))
    for piece in pieces:
        for one, other in zip(ranks[piece.rank][0], wanted, strict=True):
            assert (one[: len(piece)] - other[piece.start : piece.end]).abs().max() <= TOLERANCE * other.abs().max()
            assert not one[len(piece) :].any()
    for layer in found.mixers.layers:
        for name, part in pool.parts(layer).items():
            assert all(torch.equal(one[1].parts(layer)[name], ranks[0][1].parts(layer)[name]) for one in ranks)
            assert (part - ranks[0][1].parts(layer)[name]).abs().max() <= TOLERANCE * part.abs().max()
