"""The compiled convolution and recurrences of CPU ranks against the same in torch, row by row in float64."""

import pytest
import torch
from torch.nn import functional

from longleaf.kernels.cpu.recurrent import Convolution, NativeRecurrence, RecurrentPart, parts_tensor

SLOTS = 9
RAGGED = (
    RecurrentPart(0, 1, 4, 5),
    RecurrentPart(1, 4, -1, 0),
    RecurrentPart(4, 75, 0, 1),
    RecurrentPart(75, 76, -1, 2),
    RecurrentPart(76, 79, 3, -1),
    RecurrentPart(79, 80, 3, 6),
    RecurrentPart(80, 81, 7, -1),
)
"""Sequences that begin or continue, with one row or more; one is stored twice, two share a state, two store nothing."""
NUM_ROWS = RAGGED[-1].end
TOLERANCE = 2e-6
"""Relative to the largest number of a tensor."""
DELTA_SIZES = [(1, 1, 16, 16), (2, 4, 16, 48), (2, 2, 64, 32), (4, 8, 128, 128), (1, 3, 96, 80)]
"""Key heads, heads, key dim and value dim."""
SCAN_SIZES = [(1, 2, 16, 16), (2, 4, 64, 48), (1, 3, 128, 64), (1, 1, 256, 32)]


@pytest.fixture(scope="module")
def kernels():
    return NativeRecurrence.load()


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator)


def convolved(x_TC, convolution, conv_pool, part):
    """The rows of a part after the convolution, and the last inputs, [C, K]."""
    kernel_size = conv_pool.shape[2]
    before = conv_pool[part.source] if part.source >= 0 else torch.zeros_like(conv_pool[0])
    inputs_CT = torch.cat([before, x_TC[part.start : part.end].T], dim=1)
    bias = convolution.bias_C.double() if convolution.bias_C is not None else None
    weights = convolution.weights_KC.double().T[:, None]
    found = functional.conv1d(inputs_CT[None, :, 1:].double(), weights, bias, groups=len(weights))[0]
    return functional.silu(found).T, inputs_CT[:, -kernel_size:]


def by_rows(step, x_TC, convolution, pools, parts):
    """The results of all rows, and the pools after them. `step` computes a row from the state before it, in float64."""
    conv_pool, pool = (each.clone() for each in pools)
    results = []
    for part in parts:
        mixed_TC, last = convolved(x_TC, convolution, conv_pool, part)
        state = (pool[part.source] if part.source >= 0 else torch.zeros_like(pool[0])).double()
        for i in range(part.start, part.end):
            state, result = step(i, mixed_TC[i - part.start], state)
            results.append(result)
        if part.target >= 0:
            conv_pool[part.target], pool[part.target] = last, state.float()
    return torch.stack(results), conv_pool, pool


def inputs(generator, channels, kernel_size, state_shape, *, has_bias):
    x_TC = draw(generator, NUM_ROWS, channels)
    convolution = Convolution(
        draw(generator, kernel_size, channels) / 2, draw(generator, channels) if has_bias else None
    )
    return x_TC, convolution, (draw(generator, SLOTS, channels, kernel_size), draw(generator, SLOTS, *state_shape))


def compare(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other.double()).abs().max() <= TOLERANCE * other.abs().max()


def delta_case(sizes, kernel_size, seed, *, is_by_channel=False, has_bias=False):
    key_heads, heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * key_heads * key_dim + heads * value_dim
    x_TC, convolution, pools = inputs(generator, channels, kernel_size, sizes[1:], has_bias=has_bias)
    decays = torch.exp(-draw(generator, NUM_ROWS, heads, *[key_dim] * is_by_channel).abs())
    return x_TC, convolution, pools, decays, draw(generator, NUM_ROWS, heads).sigmoid()


def delta_step(sizes, decays, steps_TH):
    key_heads, heads, key_dim, value_dim = sizes

    def step(i, mixed_C, state_HDV):
        query, key, value = mixed_C.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim])
        query, key = (
            (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads // key_heads, dim=0)
            for each in (query.view(key_heads, key_dim), key.view(key_heads, key_dim))
        )
        state_HDV = state_HDV * decays[i].double().view(heads, -1, 1)
        error = value.view(heads, value_dim) - (state_HDV * key[..., None]).sum(1)
        state_HDV = state_HDV + key[..., None] * (error * steps_TH[i, :, None])[:, None]
        return state_HDV, (state_HDV * query[..., None]).sum(1) / key_dim**0.5

    return step


@pytest.mark.parametrize("is_by_channel", [False, True])
@pytest.mark.parametrize("kernel_size", [2, 3, 4])
@pytest.mark.parametrize("sizes", DELTA_SIZES)
def test_delta_rule_equals_its_definition(kernels, sizes, kernel_size, is_by_channel):
    case = delta_case(sizes, kernel_size, kernel_size, is_by_channel=is_by_channel, has_bias=kernel_size == 3)
    x_TC, convolution, pools, decays, steps_TH = case
    wanted = by_rows(delta_step(sizes, decays, steps_TH), x_TC, convolution, pools, RAGGED)
    assert kernels.can_run(x_TC.shape[1], kernel_size, *sizes[2:])
    found = kernels.delta_rule(x_TC, convolution, pools, parts_tensor(RAGGED), decays, steps_TH, sizes[0])
    compare((found, *pools), wanted)


def scan_case(sizes, kernel_size, seed, *, has_bias):
    groups, heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * groups * key_dim + heads * value_dim
    shape = (heads, value_dim, key_dim)
    x_TC, convolution, pools = inputs(generator, channels, kernel_size, shape, has_bias=has_bias)
    steps_TH = draw(generator, NUM_ROWS, heads).abs()
    return x_TC, convolution, pools, torch.exp(-steps_TH), steps_TH, draw(generator, heads)


def scan_step(sizes, decays_TH, steps_TH, skips_H):
    groups, heads, key_dim, value_dim = sizes

    def step(i, mixed_C, state_HVD):
        value, key, query = mixed_C.split([heads * value_dim, groups * key_dim, groups * key_dim])
        key, query = (each.view(groups, key_dim).repeat_interleave(heads // groups, dim=0) for each in (key, query))
        value_HV = value.view(heads, value_dim)
        change = (value_HV * steps_TH[i, :, None])[..., None] * key[:, None]
        state_HVD = state_HVD * decays_TH[i].double().view(heads, 1, 1) + change
        return state_HVD, (state_HVD * query[:, None]).sum(2) + value_HV * skips_H[:, None]

    return step


@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.parametrize("sizes", SCAN_SIZES)
def test_scan_equals_its_definition(kernels, sizes, kernel_size):
    case = scan_case(sizes, kernel_size, kernel_size, has_bias=kernel_size == 4)
    x_TC, convolution, pools, decays_TH, steps_TH, skips_H = case
    wanted = by_rows(scan_step(sizes, decays_TH, steps_TH, skips_H), x_TC, convolution, pools, RAGGED)
    found = kernels.scan(x_TC, convolution, pools, parts_tensor(RAGGED), decays_TH, steps_TH, skips_H, sizes[0])
    compare((found, *pools), wanted)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["delta", "channel", "scan"])
def test_bits_of_a_sequence_depend_on_nothing_else(kernels, kind, num_threads, monkeypatch):
    """Rows of a single sequence, of several, all at once and one by one, with any number of threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    sizes = (2, 4, 64, 48)

    def run(parts, num_rows=slice(None)):
        if kind == "scan":
            x_TC, convolution, pools, *others, skips_H = scan_case(sizes, 4, 0, has_bias=True)
            others = [each[num_rows].contiguous() for each in others]
            ends = (skips_H, sizes[0])
            compute = kernels.scan
        else:
            x_TC, convolution, pools, *others = delta_case(sizes, 4, 0, is_by_channel=kind == "channel")
            others, ends, compute = [each[num_rows].contiguous() for each in others], (sizes[0],), kernels.delta_rule
        found = compute(x_TC[num_rows].contiguous(), convolution, pools, parts_tensor(parts), *others, *ends)
        return found, pools

    together, pools = run(RAGGED)
    for part in RAGGED[:1] + RAGGED[3:]:
        rows = slice(part.start, part.end)
        alone, own = run([RecurrentPart(0, part.end - part.start, part.source, part.target)], rows)
        assert torch.equal(alone, together[rows])
        assert all(torch.equal(one[part.target], all_[part.target]) for one, all_ in zip(own, pools, strict=True))
    singles = [RecurrentPart(i, i + 1, 0 if i > 1 else -1, 0) for i in range(1, 75)]
    by_one, own = run([RecurrentPart(i - 1, i, one.source, 0) for i, one in enumerate(singles, 1)], slice(1, 75))
    assert torch.equal(by_one, together[1:75])
    assert all(torch.equal(one[0], all_[1]) for one, all_ in zip(own, pools, strict=True))


@pytest.mark.parametrize("kind", ["delta", "scan"])
def test_non_finite_rows_spoil_their_sequence_only(kernels, kind):
    sizes = (2, 4, 16, 16)
    if kind == "scan":
        x_TC, convolution, pools, *others = scan_case(sizes, 4, 0, has_bias=True)
        compute = kernels.scan
    else:
        x_TC, convolution, pools, *others = delta_case(sizes, 4, 0)
        compute = kernels.delta_rule
    x_TC[10] = torch.nan
    found = compute(x_TC, convolution, pools, parts_tensor(RAGGED), *others, sizes[0])
    is_spoiled = found.isnan().flatten(1).all(1)
    assert is_spoiled.tolist() == [10 <= i < 75 for i in range(NUM_ROWS)]


@pytest.mark.parametrize("x", [-1e4, -88.5, -20.0, -1.0, -1e-6, 0.0, 3.0, 89.0, 1e4])
def test_silu_of_any_size(kernels, x):
    """Without weights of earlier inputs the convolution is only SiLU; the scan passes it on as `skips` do."""
    x_TC = torch.full((1, 48), x)
    weights_KC = torch.zeros(4, 48)
    weights_KC[3] = 1.0
    pools = (torch.zeros(1, 48, 4), torch.zeros(1, 1, 16, 16))
    ones, zeros = torch.ones(1, 1), torch.zeros(1, 1)
    parts_P4 = parts_tensor([RecurrentPart(0, 1, -1, -1)])
    found = kernels.scan(x_TC, Convolution(weights_KC, None), pools, parts_P4, ones, zeros, torch.ones(1), 1)
    wanted = functional.silu(torch.tensor(x, dtype=torch.float64))
    assert abs(found[0, 0, 0].double() - wanted) <= 3e-7 * abs(wanted) + 1e-30
