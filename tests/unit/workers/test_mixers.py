"""Layers with recurrent states: their cache, their trial, and the rows of several sequences in one step."""

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from longleaf.errors import ModelRefused
from workers.kv_cache.states import StatePool
from workers.model import mixers, model
from workers.model.mixers import PartName, SequenceMixer, StateCache
from workers.step.states import SequenceRows, StateRows, StateStep
from zoo.checkpoints import make_checkpoint

SIZES = (2, 1, 5, 1, 3)


@pytest.mark.parametrize("kernel_size", [3, 4])
def test_cache_keeps_the_states_that_transformers_keeps(kernel_size):
    cache, own, generator = LinearAttentionLayer(), StateCache(), torch.Generator().manual_seed(0)
    assert own.get_conv_state(0) is None
    assert not own.has_previous_state(0)
    for size in SIZES:
        conv, recurrent = (torch.randn(2, 3, number, generator=generator) for number in (size, 7))
        wanted = cache.update_conv_state(conv, conv_kernel_size=kernel_size)
        assert torch.equal(own.update_conv_state(conv, 0, conv_kernel_size=kernel_size), wanted)
        assert torch.equal(own.update_recurrent_state(recurrent, 0), cache.update_recurrent_state(recurrent))
        assert torch.equal(own.get_conv_state(0), cache.conv_states[0])
        assert torch.equal(own.get_recurrent_state(0), cache.recurrent_states[0])


def load(tmp_path, family):
    return model.load(str(make_checkpoint(tmp_path, family)), "float32", "cpu")


def test_module_that_forgets_its_state_computes_rows_one_by_one(tmp_path, caplog):
    assert load(tmp_path, "jamba").mixers.one_by_one == [0, 2]
    assert "layers 0 and 2: rows of a sequence are computed one by one" in caplog.text


def test_module_that_never_uses_its_state_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        mixers.StateCache,
        "update_recurrent_state",
        lambda self, state, *_: self.parts.setdefault(PartName("recurrent", 0), torch.zeros_like(state)),
    )
    with pytest.raises(ModelRefused, match="the recurrent state of layer 0 does not determine its next results"):
        load(tmp_path, "qwen3_next")


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba"])
def test_rows_of_several_sequences_equal_those_of_each(tmp_path, family):
    """A sequence that begins and stores two states, and others with a state, with one row or more."""
    found = load(tmp_path, family)
    layer, mixer = next(iter(found.mixers.layers.items()))
    pool, generator = StatePool(found.mixers.parts(), 12, found.dtype, "cpu"), torch.Generator().manual_seed(0)
    before = []
    for slot in (4, 5, 6):
        cache = StateCache()
        mixer.compute(torch.randn(1, 3 + slot, 64, generator=generator), cache)
        pool.store(layer, torch.tensor([slot]), cache.parts)
        before.append(StateCache({name: part.clone() for name, part in cache.parts.items()}))
    rows_TF = torch.randn(12, 64, generator=generator)
    sequences = [
        SequenceRows(0, 1, 4, ((1, 7),)),
        SequenceRows(1, 6, None, ((2, 8), (5, 9))),
        SequenceRows(6, 7, 5, ((1, 10),)),
        SequenceRows(7, 12, 6, ()),
    ]
    results_TF = StateStep(StateRows(sequences), pool, "cpu").mix(mixer, rows_TF)
    caches = [before[0], StateCache(), before[1], before[2]]
    for sequence, cache in zip(sequences, caches, strict=True):
        wanted = _compute(mixer, rows_TF[sequence.start : sequence.end], cache)
        torch.testing.assert_close(results_TF[sequence.start : sequence.end], wanted, rtol=1e-4, atol=1e-4)
        for count, slot in sequence.stores[-1:]:
            assert count == sequence.end - sequence.start
            for name, part in pool.load(layer, torch.tensor([slot])).items():
                torch.testing.assert_close(part, cache.parts[name], rtol=1e-4, atol=1e-4)


def _compute(mixer: SequenceMixer, rows_LF: torch.Tensor, cache: StateCache) -> torch.Tensor:
    return torch.cat([mixer.compute(row_1F[None], cache)[0] for row_1F in rows_LF.split(1)])
