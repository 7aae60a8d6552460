"""Rules that divide weights: layers that may be divided, and layers that must not."""

import pytest
import torch
from torch import nn

from workers.model.meta_model import outline
from workers.model.weight_parts import Pair, are_addends, is_elementwise, is_lookup, plan_weights, share_bytes
from workers.model.weight_shares import Cut, Share
from zoo.checkpoints import make_checkpoint

HIDDEN, WIDTH = 8, 32


class Mlp(nn.Module):
    """A gated MLP, with an operation before its last layer."""

    def __init__(self, between=lambda rows: rows):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.between = between

    def forward(self, x):
        return self.down(self.between(torch.sigmoid(self.gate(x)) * self.up(x)))


def test_a_gated_mlp_is_elementwise():
    assert is_elementwise(Mlp(), ["gate", "up"], "down")


@pytest.mark.parametrize(
    "between",
    [
        lambda rows: rows / rows.norm(dim=-1, keepdim=True),
        lambda rows: rows.flip(-1),
        lambda rows: rows.unflatten(-1, (WIDTH // 2, 2)).flatten(-2),
        lambda rows: rows + torch.arange(rows.shape[-1]),
    ],
)
def test_an_mlp_that_mixes_its_width_is_not(between):
    assert not is_elementwise(Mlp(between), ["gate", "up"], "down")


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 1)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


def test_embeddings_that_change_their_ids_are_not_lookups():
    assert is_lookup(nn.Embedding(100, HIDDEN, padding_idx=0))
    assert is_lookup(Scaled(100, HIDDEN))
    assert not is_lookup(Shifted(100, HIDDEN))


class Experts(nn.Module):
    """All experts over all rows, with gates and projections one after the other, or alternating."""

    def __init__(self, is_alternating):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, HIDDEN, 2 * WIDTH))
        self.down_proj = nn.Parameter(torch.randn(3, WIDTH, HIDDEN))
        self.down_proj_bias = nn.Parameter(torch.randn(3, HIDDEN))
        self.is_alternating = is_alternating

    def forward(self, hidden):
        both = hidden.view(3, -1, HIDDEN) @ self.gate_up_proj
        gate, up = (both[..., ::2], both[..., 1::2]) if self.is_alternating else both.chunk(2, dim=-1)
        return ((gate.sigmoid() * up) @ self.down_proj + self.down_proj_bias[:, None]).flatten(0, 1)


@pytest.mark.parametrize("is_alternating", [False, True])
def test_experts_are_divided_only_in_their_own_layout(is_alternating):
    experts, call = Experts(is_alternating), (torch.randn(6, HIDDEN),)
    layouts = {True: Cut(2, unit=2), False: Cut(2, num_blocks=2)}
    for layout, cut in layouts.items():
        cuts = {"gate_up_proj": cut, "down_proj": Cut(1)}
        assert are_addends(experts, cuts, ("down_proj_bias",), call) == (layout == is_alternating)
    assert not are_addends(experts, {"gate_up_proj": layouts[is_alternating]}, ("down_proj_bias",), call)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    outlines = {}

    def get(family):
        if family not in outlines:
            outlines[family] = outline(str(make_checkpoint(tmp_path_factory.mktemp(family), family)), "float32")
        return outlines[family]

    return get


def test_layers_with_the_same_input_share_an_exchange(known):
    plan = plan_weights(known("llama"), 3)
    attention = "model.layers.0.self_attn"
    assert tuple(f"{attention}.{name}_proj" for name in "qkv") in plan.groups
    assert (f"{attention}.o_proj",) in plan.groups
    assert Pair(("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"), "model.layers.0.mlp.down_proj") in (
        plan.pairs
    )
    assert plan.cuts["model.layers.0.mlp.down_proj.weight"] == Cut(1)


def test_a_family_without_a_plan_is_divided_by_outputs_alone(known):
    plan = plan_weights(known("gpt2"), 2)
    assert not plan.pairs
    assert plan.cuts["transformer.h.0.mlp.c_proj.weight"] == Cut(1)  # its weights are transposed
    assert plan.cuts["transformer.h.0.mlp.c_proj.bias"] == Cut(0)


def test_a_layer_is_on_every_rank_if_its_weights_are_used_directly(known):
    assert not any("kv_b_proj" in name for name in plan_weights(known("deepseek_v3"), 2).cuts)


def test_a_tied_head_has_the_words_of_the_embedding(known):
    plan = plan_weights(known("qwen2.5"), 3)
    assert plan.embeddings == ("model.embed_tokens",)
    assert ("lm_head",) in plan.groups


class Gated(nn.Module):
    """Calls one of its layers only."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[0](x)


def test_layers_that_may_receive_no_rows_are_on_every_rank(tmp_path, monkeypatch):
    """A rank whose rows choose another expert would not take part in the exchange."""
    from workers.model import meta_model

    def build(*given):
        module = plain(*given)
        for layer in module.model.layers:
            layer.mlp.gate_proj = Gated(nn.ModuleList([layer.mlp.gate_proj, layer.mlp.gate_proj.__class__(64, 4)]))
        return module

    plain = meta_model.build
    monkeypatch.setattr(meta_model, "build", build)
    plan = plan_weights(outline(str(make_checkpoint(tmp_path, "llama")), "float32"), 2)
    assert not plan.pairs
    assert not any("gate_proj" in name for name in plan.cuts)
    assert ("model.layers.0.mlp.up_proj",) in plan.groups


@pytest.mark.parametrize("family", ["llama", "qwen2.5", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_share_is_an_equal_part_of_the_weights(known, family, count):
    found, plan = known(family), plan_weights(known(family), count)
    whole = sum(parameter.numel() * parameter.itemsize for parameter in found.parameters.values())
    every = sum(p.numel() * p.itemsize for name, p in found.parameters.items() if name not in plan.cuts)
    assert every < 0.02 * whole
    for index in range(count):
        assert share_bytes(found, plan, Share.even(index, count)) - every <= 1.02 * whole / count
