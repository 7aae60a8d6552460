"""Sharded layers compute the function of the layers that they replace, with the same bits on all ranks."""

import pytest
import torch
from torch import nn

from longleaf.errors import GroupFailed
from tests.support.loopback import loopback
from tests.support.on_threads import on_ends
from workers.model.sharded_layers import (
    OutputGroup,
    PairRows,
    RowExchange,
    ShardedEmbedding,
    ShardedExperts,
    ShardedLinear,
    ShardedPairInput,
    ShardedPairOutput,
    replace_modules,
)
from workers.model.weight_parts import take
from workers.model.weight_shares import Cut, Share

HIDDEN, WIDTH, WORDS, ROWS = 10, 23, 31, 4
ORDERS = [(0, 1, 2), (2, 0, 1)]
"""The share of each rank: replacements hold those of the ranks that they replace."""
pytestmark = pytest.mark.parametrize("order", ORDERS)


def layer_of(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


def computed(order, make, *inputs_N, own):
    """The results of all ranks. `make(share, exchange)` returns the module; each of the inputs is [N, ...]."""

    @torch.inference_mode()
    def work(comm):
        share = Share.even(order[comm.rank], len(order))
        exchange = RowExchange(share)
        module = make(share, exchange)
        exchange.enter(comm, "cpu", "cpu")
        exchange.set_rows(own=own)
        results = [module(*(one[comm.rank] for one in inputs_N)) for _ in range(2)]
        assert torch.equal(*results)
        return results[0]

    return on_ends(loopback(len(order)), work)


def inputs(own, *shape):
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(3, *shape, generator=generator)
    return found if own else found[:1].expand(found.shape)


def check(found, expected, own):
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)
    if not own:
        assert all(torch.equal(one, found[0]) for one in found)


class Together(nn.Module):
    """Two linear layers over the same tensor."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_group_of_linear_layers(order, own, rows):
    plain = [nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, 7, bias=False)]

    def make(share, exchange):
        group = OutputGroup(exchange)
        local = [
            layer_of(take(layer.weight, Cut(0), share), None if layer.bias is None else take(layer.bias, Cut(0), share))
            for layer in plain
        ]
        return Together(
            *(ShardedLinear(one, layer.out_features, group) for one, layer in zip(local, plain, strict=True))
        )

    x = inputs(own, 1, rows, HIDDEN)
    check(computed(order, make, x, own=own), Together(*plain)(x), own)


class Mlp(nn.Module):
    def __init__(self, gate, up, down):
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("own", [False, True])
def test_a_pair_of_linear_layers(order, own):
    gate, up, down = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def make(share, exchange):
        rows = PairRows(exchange)
        first = [
            ShardedPairInput(layer_of(take(one.weight, Cut(0), share), take(one.bias, Cut(0), share)), rows)
            for one in (gate, up)
        ]
        return Mlp(*first, ShardedPairOutput(layer_of(take(down.weight, Cut(1), share)), down.bias, rows))

    x = inputs(own, 1, ROWS, HIDDEN)
    check(computed(order, make, x, own=own), Mlp(gate, up, down)(x), own)


@pytest.mark.parametrize("own", [False, True])
def test_an_embedding(order, own):
    plain = nn.Embedding(WORDS, HIDDEN, padding_idx=WORDS - 1)

    def make(share, exchange):
        local = nn.Embedding(WORDS, HIDDEN, padding_idx=WORDS - 1)
        local.weight = nn.Parameter(take(plain.weight, Cut(0), share))
        return ShardedEmbedding(local, WORDS, exchange)

    ids = torch.arange(WORDS - 1 - 3 * ROWS, WORDS - 1).view(3, 1, ROWS) + 1
    ids = ids if own else ids[:1].expand(ids.shape)
    found = computed(order, make, ids, own=own)
    assert all(torch.equal(one, wanted) for one, wanted in zip(found, plain(ids), strict=True))


class Experts(nn.Module):
    """Routed experts; ids from `num_experts` on return their rows."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, hidden, ids, weights):
        out = torch.zeros_like(hidden)
        for row, (one, chosen) in enumerate(zip(hidden, ids, strict=True)):
            for place, expert in enumerate(chosen.tolist()):
                is_empty = expert >= len(self.down)
                found = one if is_empty else self.down[expert] @ torch.relu(self.up[expert] @ one)
                out[row] += weights[row, place] * found
        return out


@pytest.mark.parametrize("own", [False, True])
def test_experts_of_which_some_have_no_weights(order, own):
    up, down = torch.randn(2, WIDTH, HIDDEN), torch.randn(2, HIDDEN, WIDTH)

    def make(share, exchange):
        return ShardedExperts(Experts(take(up, Cut(1), share), take(down, Cut(2), share)), 2, exchange)

    hidden, weights = inputs(own, ROWS, HIDDEN), inputs(own, ROWS, 2)
    ids = torch.randint(3, (3, ROWS, 2), generator=torch.Generator().manual_seed(0))
    ids = ids if own else ids[:1].expand(ids.shape)
    expected = [Experts(up, down)(*one) for one in zip(hidden, ids, weights, strict=True)]
    check(computed(order, make, hidden, ids, weights, own=own), expected, own)


def test_ranks_that_do_not_hold_each_share_once_are_refused(order):
    def work(comm):
        with pytest.raises(GroupFailed, match="240 of 240 parts are not held by exactly one"):
            RowExchange(Share.even(0, len(order))).enter(comm, "cpu", "cpu")

    on_ends(loopback(2), work)
    with pytest.raises(GroupFailed, match="160 of 240 parts"):
        RowExchange(Share.even(1, len(order))).enter(None, "cpu", "cpu")


def test_ranks_on_different_processors_are_refused(order):
    """They might choose different experts."""

    def work(comm):
        with pytest.raises(GroupFailed, match=f"processors of the ranks differ.* this rank has kind {comm.rank % 2}"):
            RowExchange(Share.even(order[comm.rank], len(order))).enter(comm, "cpu", f"kind {comm.rank % 2}")

    on_ends(loopback(len(order)), work)


def test_a_share_computes_nothing_outside_of_a_group(order):
    group = OutputGroup(RowExchange(Share.even(order[0], 3)))
    layer = ShardedLinear(nn.Linear(HIDDEN, WIDTH), 3 * WIDTH, group)
    with pytest.raises(RuntimeError, match="outside of a group"):
        layer(torch.zeros(1, HIDDEN))


def test_modules_are_replaced_wherever_they_occur(order):
    old, new = nn.Linear(1, 1), nn.Linear(1, 1)
    parent = nn.ModuleDict({"one": old, "two": nn.Sequential(old, nn.Linear(1, 1))})
    replace_modules(parent, {old: new})
    assert parent["one"] is new
    assert parent["two"][0] is new
    assert parent["two"][1] is not new
