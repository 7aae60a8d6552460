"""The backend that uses flash kernels for many rows, with a fake one: the distribution of reads, and the merge of
results.
"""

import logging
import sys
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from longleaf.attention.masks import Read, Reads
from longleaf.kernels.gpu import flash, varlen, varlen_plan
from longleaf.kernels.gpu.flash import FlashKernels
from longleaf.kernels.gpu.launch import launch
from longleaf.kernels.gpu.varlen import FlashSource
from tests.support.attention.partials import assert_same, seeds
from tests.support.attention.rectangles import expected, rectangles
from tests.support.attention.varlen import PretendedFlash, attended

NUM_SLOTS, SCALE = 420, 0.2
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
FULL, OTHER, SQUARE = Read(0, 9, 3, 303), Read(0, 4, 310, 330), Read(4, 9, 335, 340, offset=0)
BAND, FEW = Read(0, 9, 350, 400, 40, 9), Read(0, 1, 405, 410)
INVALID = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
MIXED = [FULL, OTHER, BAND, SQUARE, FEW]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(varlen_plan, "MIN_ROWS", 3)
    monkeypatch.setattr(varlen_plan, "MIN_KEYS", 15)


class Launches:
    """A launcher that records its launches."""

    def __init__(self):
        self.names = []

    def __call__(self, kernel, grid, *args, **constants):
        self.names.append(kernel.fn.__name__)
        launch(kernel, grid, *args, **constants)


def tensors(seed, num_rows, heads=(2, 3), dim=16, dtype=torch.bfloat16):
    """Queries [T, H, D], keys and values [K, S, D]."""
    generator, (num_kv_heads, group) = torch.Generator().manual_seed(seed), heads
    shapes = ((num_kv_heads * group, num_rows), (num_kv_heads, NUM_SLOTS), (num_kv_heads, NUM_SLOTS))
    q, k, v = (torch.randn(*shape, dim, generator=generator).to(dtype) for shape in shapes)
    return q.transpose(0, 1), k, v  # queries as models hand them over


def kernels(launcher=launch):
    return FlashKernels(4, PretendedFlash().source, launcher)


def check(q, k, v, reads, softcap=None, source=None):
    """Checks that the partial is right, and that slots outside all reads are not loaded."""
    wanted = expected(q, k, v, reads, SCALE, softcap)
    is_named = torch.zeros(NUM_SLOTS, dtype=torch.bool)
    for read in reads:
        is_named[read.slot_start : read.slot_end] = True
    for tensor in (k, v):
        tensor[:, ~is_named] = torch.nan
    backend = FlashKernels(4, source or PretendedFlash().source)
    assert_same(backend.attend(q, k, v, Reads(reads), SCALE, softcap), wanted, TOLERANCES[q.dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "dim"), [((1, 1), 64), ((2, 3), 80), ((4, 1), 128), ((1, 8), 256)])
def test_rounds_and_the_rest_agree_with_float64(dtype, heads, dim):
    check(*tensors(dim, 11, heads, dim, dtype), MIXED)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=seeds, num_rows=st.integers(3, 20), dtype=st.sampled_from(list(TOLERANCES)))
def test_any_rectangles_are_read(data, seed, num_rows, dtype):
    check(*tensors(seed, num_rows, dtype=dtype), data.draw(rectangles(num_rows)))


def launched(q, k, v, reads, softcap=None):
    """The launches of our kernels, and the number of flash launches; the table exists before."""
    names, pretended = Launches(), PretendedFlash()
    backend = FlashKernels(4, pretended.source, names)
    backend.attend(q, k, v, reads, SCALE, softcap)
    return names.names, len(pretended.launches)


def test_each_read_goes_where_it_belongs():
    q, k, v = tensors(0, 9)
    ours, rest = ["propagate_nonfinite", "fold_rounds"], ["attend_items", "fold_items"]
    assert launched(q, k, v, Reads([FULL, SQUARE])) == (ours, 2)
    assert launched(q, k, v, Reads([FULL, BAND])) == ([ours[0], *rest, ours[1]], 1)
    assert launched(q, k, v, Reads([BAND, FEW])) == (rest, 0)
    assert launched(q[:2], k, v, Reads([Read(0, 2, 0, 300)])) == (rest, 0)


@pytest.mark.parametrize(
    ("change", "softcap"),
    [
        (lambda q, k, v: (q, k, v), 5.0),
        (lambda q, k, v: (q.float(), k.float(), v.float()), None),
        (lambda q, k, v: (q.float(), k, v), None),
        (lambda q, k, v: (q, k, k[..., :8]), None),
        (lambda q, k, v: (q[..., :12].clone(), k[..., :12].clone(), v[..., :12].clone()), None),
        (lambda q, k, v: (q[..., 4:12], k[..., 4:12], v[..., 4:12]), None),  # at no multiple of 16 bytes
    ],
)
def test_what_flash_kernels_cannot_take_is_not_given_to_them(change, softcap):
    q, k, v = change(*tensors(0, 9))
    names, pretended = Launches(), PretendedFlash()
    found = FlashKernels(4, pretended.source, names).attend(q, k, v, Reads(MIXED), SCALE, softcap)
    assert (names.names, pretended.launches) == (["attend_items", "fold_items"], [])
    assert_same(found, expected(q, k, v, MIXED, SCALE, softcap), TOLERANCES[torch.bfloat16])


def test_heads_of_320_dims_are_not_given_to_them():
    q, k, v = tensors(0, 9, (1, 1), 320)
    assert not varlen.can_take(q, k, v)
    assert varlen.can_take(*(tensor[..., :256] for tensor in (q, k, v)))


def test_launches_do_not_grow_with_the_stretches():
    reads = Reads([*(Read(0, 9, low, low + 20 + low // 10) for low in range(0, 350, 50)), BAND])
    names, count = launched(*tensors(0, 9), reads)
    assert count == varlen_plan.MAX_ROUNDS
    assert names == ["propagate_nonfinite", "attend_items", "fold_items", "fold_rounds"]


def test_gathered_keys_lie_with_strides():
    q, k, v = tensors(0, 9)
    both_SKC = torch.cat((k.transpose(0, 1), v.transpose(0, 1)), dim=-1)
    check(q, *both_SKC.transpose(0, 1).chunk(2, dim=-1), MIXED)


def test_layers_that_are_alike_share_one_plan():
    q, k, v = tensors(0, 9)
    pretended, reads = PretendedFlash(), Reads([FULL])
    for _ in range(2):
        FlashKernels(4, pretended.source).attend(q, k, v, reads, SCALE)
    one, two = pretended.launches
    assert all(a is b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["key", "value", "query"])
def test_what_is_not_finite_shows_to_those_that_see_it(broken, place):
    """The kernel of others hides a key of score -inf, and takes a row whose mass is NaN for one that sees nothing."""
    q, k, v = (tensor.abs() for tensor in tensors(0, 9, (2, 2)))
    {"key": k[0, 320], "value": v[0, 320], "query": q[1, 1]}[place][3] = broken
    found = kernels().attend(q, k, v, Reads([FULL, OTHER, SQUARE]), SCALE)
    is_sound = found.out_THD.isfinite().all(dim=2)
    rows = [1] if place == "query" else range(4)
    heads = [1] if place == "query" else [0, 1]
    assert (~is_sound).nonzero().tolist() == [[row, head] for row in rows for head in heads]
    if place != "value":
        assert (~found.lse_TH.isfinite()).nonzero().tolist() == (~is_sound).nonzero().tolist()


def test_rows_in_no_round_are_the_identity_or_the_remaining_partial():
    q, k, v = tensors(0, 12)
    found = kernels().attend(q, k, v, Reads([Read(2, 7, 0, 50), FEW]), SCALE)
    is_empty = (found.lse_TH == -torch.inf).all(dim=1)
    assert is_empty.nonzero().flatten().tolist() == [1, 7, 8, 9, 10, 11]
    assert not found.out_THD[is_empty].any()


@pytest.fixture
def whole(monkeypatch):
    monkeypatch.setattr(varlen_plan, "MIN_ROWS", 64)
    monkeypatch.setattr(varlen_plan, "MIN_KEYS", 512)


def wrong_by(change):
    """A flash kernel whose out and lse are modified by `change`."""

    def run(*args):
        return change(*PretendedFlash()(*args))

    return lambda: FlashSource(run)


def missing():
    raise ImportError("no module named flash_attn")


def refuses(*args):
    raise RuntimeError("requires an Ampere GPU")


WRONG = {
    "base 2": (wrong_by(lambda out, lse: (out, lse / 0.6931472)), "ArithmeticError: out is off by"),
    "rows first": (wrong_by(lambda out, lse: (out, lse.T)), "RuntimeError: .* is no lse of queries"),
    "padded": (wrong_by(lambda out, lse: (out, torch.nn.functional.pad(lse, (0, 20)))), "RuntimeError: .* is no lse"),
    "lse": (wrong_by(lambda out, lse: (out, lse + 0.01)), "ArithmeticError: lse is off by"),
    "not there": (missing, "ImportError: no module named flash_attn"),
    "refused": (lambda: FlashSource(refuses), "RuntimeError: requires an Ampere GPU"),
}


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", WRONG)
def test_flash_kernels_that_are_wrong_are_not_used(name, monkeypatch):
    source, reason = WRONG[name]
    monkeypatch.setattr(varlen, "SOURCES", {name: source})
    with pytest.raises(RuntimeError, match=f"^no flash kernels: {name}: {reason}"):
        flash.fastest(4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("slower", "best", "note"),
    [(2.0, "right", "regular took 2 times"), (1.02, "right", "regular took 1 times"), (0.5, "regular", "right took 2")],
)
def test_the_fastest_that_is_there_and_right_is_used(slower, best, note, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    right, regular = PretendedFlash(), PretendedFlash()
    sources = {name: WRONG[name][0] for name in ("not there", "refused")}
    sources |= {"right": lambda: right.source, "regular": lambda: regular.regular_source}
    monkeypatch.setattr(varlen, "SOURCES", sources)
    monkeypatch.setattr(flash, "what_is_wrong", lambda kernels, *_: refuses() if kernels.source[0] is refuses else None)

    def seconds(kernels, device):
        return slower if kernels.source.needs_regular_shapes else 1.0

    found = flash.fastest(4, torch.device("cpu"), seconds=seconds)
    assert found.source.kernel is {"right": right, "regular": regular}[best]
    (message,) = caplog.messages
    assert message.startswith(f"flash kernels of prefill: {best} ({note}")
    assert "not there: ImportError: no module named flash_attn; refused: " in message


@pytest.mark.usefixtures("whole")
def test_a_single_source_is_not_measured(monkeypatch):
    monkeypatch.setattr(varlen, "SOURCES", {"right": lambda: PretendedFlash().source})
    monkeypatch.setattr(flash, "seconds_of_a_chunk", None)
    flash.fastest(4, torch.device("cpu"))


def test_the_time_of_plans_is_spread_over_their_uses(monkeypatch):
    """A source that needs 10 s for each new number of keys, and 1 s for each call."""
    now, seen = [0.0], set()

    class Timed:
        def attend(self, q, k, v, reads, scale):
            keys = reads[0].slot_end
            now[0] += 1.0 if keys in seen else 11.0
            seen.add(keys)

    monkeypatch.setattr(flash.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(flash, "CHUNK_ROWS", 4)
    monkeypatch.setattr(flash, "CHUNK_PASTS", (64, 32))
    assert flash.seconds_of_a_chunk(Timed(), torch.device("cpu")) == 1.0 + 10.0 / flash.PLAN_USES


@pytest.fixture
def regular(monkeypatch):
    monkeypatch.setattr(varlen_plan, "MIN_REGULAR_ROWS", 2)
    monkeypatch.setattr(varlen_plan, "MIN_REGULAR_KEYS", 16)


@pytest.fixture
def dense_cudnn(monkeypatch):
    """cuDNN's attention without cuDNN; it records the shapes of queries and keys."""
    shapes = []

    def attention(q, k, v, is_causal, scale):
        assert (q.shape[0], k.shape[0], v.shape) == (1, 1, k.shape)
        shapes.append((q.shape[2], q.stride(), k.shape[2]))
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (q, k, v))
        out, lse = attended(q, k, v, scale, is_causal)
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)

    monkeypatch.setattr(varlen, "cudnn_attention", attention)
    return shapes


CUDNN = FlashSource(varlen.cudnn_kernel, 128, needs_regular_shapes=True)


@pytest.mark.usefixtures("regular")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=seeds, num_rows=st.integers(3, 20), dtype=st.sampled_from(list(TOLERANCES)))
def test_any_rectangles_are_read_in_regular_shapes(dense_cudnn, data, seed, num_rows, dtype):
    dense_cudnn.clear()
    check(*tensors(seed, num_rows, dtype=dtype), data.draw(rectangles(num_rows)), source=CUDNN)
    for rows, _, keys in dense_cudnn:
        assert rows & (rows - 1) == 0
        assert keys == rows or keys == varlen_plan.regular_keys(keys)


@pytest.mark.usefixtures("regular")
def test_plans_of_cudnn_do_not_depend_on_the_chunk(dense_cudnn):
    for num_rows in (16, 17, 21):
        q, k, v = tensors(0, num_rows)
        check(q.contiguous(), k, v, [Read(0, num_rows, 0, 40)], source=CUDNN)
    assert {rows for rows, _, _ in dense_cudnn} == {16, 4}
    assert len(set(dense_cudnn)) == 2


@INVALID
@pytest.mark.usefixtures("whole")
def test_cudnn_passes_the_self_test(dense_cudnn):
    kernels = FlashKernels(4, CUDNN)
    assert flash.what_is_wrong(kernels, torch.device("cpu"), torch.bfloat16) is None
    assert {rows for rows, _, _ in dense_cudnn} == {256}


def test_flash_attn_4_is_called_with_the_lengths_of_sequences(monkeypatch):
    """Its public function, here with the results of a source that has the same rules."""
    pretended, module = PretendedFlash(), types.ModuleType("flash_attn.cute")

    def run(q, k, v, *, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, **options):
        assert options == {"causal": options["causal"], "return_lse": True}
        launch = varlen.Launch(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, options["causal"])
        return pretended(q, k, v, launch, softmax_scale)

    module.flash_attn_varlen_func = run
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(varlen_plan, "MIN_REGULAR_ROWS", 2)
    monkeypatch.setattr(varlen_plan, "MIN_REGULAR_KEYS", 16)
    check(*tensors(0, 9), [FULL, SQUARE], source=varlen.flash_attn_4())
    assert {one.is_causal for one in pretended.launches} == {False, True}


def test_cudnn_is_refused_where_torch_lacks_it():
    with pytest.raises(ImportError, match="^this torch has no cuDNN$"):
        varlen.cudnn()


def test_regular_parts_cover_a_read():
    read = Read(3, 4099, 1000, 131_000)
    parts, remainder = varlen_plan.regular_parts(read)
    assert [part[:4] for part in parts] == [
        (3, 4099, 1000, 115_688),
        (3, 4099, 115_688, 130_024),
    ]
    assert remainder == [Read(3, 4099, 130_024, 131_000)]
    square = Read(0, 4100, 0, 4100, offset=0)
    parts, remainder = varlen_plan.regular_parts(square)
    assert parts == [Read(0, 4096, 0, 4096, offset=0)]
    assert remainder == [Read(4096, 4100, 0, 4096), Read(4096, 4100, 4096, 4100, offset=0)]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", ["torch", "torch's varlen_attn"])
def test_torch_varlen_does_not_query_the_device(name):
    """Shapes and types, from torch's metadata of its kernels, without a device."""
    names = []

    def note(kernel, *args, **constants):
        names.append(kernel.fn.__name__)

    backend = FlashKernels(4, varlen.SOURCES[name](), note)
    reads = Reads([Read(0, 600, 0, 4000), Read(100, 600, 4100, 4600, offset=0), Read(0, 600, 5000, 5600, 600, 99)])
    with FakeTensorMode():
        k = torch.randn(2, 6000, 64, dtype=torch.bfloat16)
        q = torch.randn(8, 600, 64, dtype=torch.bfloat16).transpose(0, 1)
        for _ in range(2):
            partial = backend.attend(q, k, torch.randn_like(k), reads, 0.1)
    assert (partial.out_THD.shape, partial.lse_TH.shape) == ((600, 8, 64), (600, 8))
    assert names == ["propagate_nonfinite", "attend_items", "fold_items", "fold_rounds"] * 2


@pytest.mark.usefixtures("whole")
def test_what_the_self_test_reads_takes_rounds_of_each_kind():
    pretended = PretendedFlash()
    assert flash.what_is_wrong(FlashKernels(4, pretended.source), torch.device("cpu"), torch.bfloat16) is None
    assert [one.is_causal for one in pretended.launches].count(True) == 1
    assert len(pretended.launches) == 3


@pytest.mark.usefixtures("whole")
def test_a_key_that_hides_is_found_by_the_self_test(monkeypatch):
    monkeypatch.setattr(FlashKernels, "_propagate_nonfinite", lambda *args: None)
    wrong = flash.what_is_wrong(kernels(), torch.device("cpu"), torch.bfloat16)
    assert wrong == "a key that is infinite does not show"
