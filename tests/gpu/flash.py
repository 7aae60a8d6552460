"""Flash kernels on a GPU: which are available and right, and their results for a chunk."""

import torch

from longleaf.attention.masks import Read, Reads
from longleaf.kernels.gpu import varlen, varlen_plan
from longleaf.kernels.gpu.flash import FlashKernels, right_ones, what_is_wrong
from tests.gpu.place import TOLERANCES, LeftOut, Place, assert_close, scale_of, wanted

KEY_HEADS, GROUP, NUM_ROWS, NUM_KEYS = 2, 16, 1024, 12_000
FLASH_TOLERANCES = {dtype: 2 * TOLERANCES[dtype] for dtype in varlen.TYPES}
"""The output of flash kernels is rounded one more time."""


def cudnn_is_right(place: Place) -> None:
    """cuDNN's attention, in both types."""
    is_right(place, "cuDNN")


def flash_attn_4_is_right(place: Place) -> None:
    """flash-attn 4, where it is installed."""
    is_right(place, "flash-attn 4")


def regular_shapes_agree_with_float64(place: Place) -> None:
    """Chunks of any size after any number of keys, by each of the kernels that are there."""
    place.needs_gpu()
    right, _ = right_ones(num_multiprocessors(place), torch.device(place.device))
    for name, kernels in right.items():
        for num_rows, past in ((1024, 6000), (1500, 4111), (700, 2048)):
            own = Read(0, num_rows, past, past + num_rows, offset=0)
            reads = [Read(0, num_rows, 0, past), own]
            q = place.drawn(0, KEY_HEADS * 4, num_rows, 128, dtype=torch.bfloat16).transpose(0, 1)
            k, v = (place.drawn(i, KEY_HEADS, NUM_KEYS, 128, dtype=torch.bfloat16) for i in (1, 2))
            right_partial = wanted(q, k, v, reads)
            k[:, own.slot_end :], v[:, own.slot_end :] = torch.nan, torch.nan
            found = kernels.attend(q, k, v, Reads(reads), scale_of(q))
            try:
                assert_close(found, right_partial, FLASH_TOLERANCES[torch.bfloat16])
            except AssertionError as error:
                raise AssertionError(f"{name}, {num_rows} rows after {past}: {error}") from error


def torchs_own_is_right(place: Place) -> None:
    """Torch's own passes the self-test, in both types."""
    is_right(place, "torch")


def torchs_public_one_is_right(place: Place) -> None:
    """The same function by its public name, where it accepts the necessary arguments."""
    is_right(place, "torch's varlen_attn")


def flash_attn_is_right(place: Place) -> None:
    """flash-attn 2, where it is installed."""
    is_right(place, "flash-attn")


def is_right(place: Place, name: str) -> None:
    place.needs_gpu()
    if torch.cuda.get_device_capability(place.device) < (8, 0):
        raise LeftOut("flash kernels need compute capability 8.0")
    try:
        kernels = FlashKernels(num_multiprocessors(place), varlen.SOURCES[name]())
    except ImportError as error:
        raise LeftOut(str(error)) from error
    for dtype in varlen.TYPES:
        complaint = what_is_wrong(kernels, torch.device(place.device), dtype)
        assert not complaint, f"{name}, {dtype}: {complaint}"


def chunks_of_every_dim(place: Place) -> None:
    """Long stretches, more than there are rounds, a diagonal, a band, short ones; slots that no row sees hold NaN."""
    place.needs_gpu()
    kernels, num_own = FlashKernels.load(), NUM_ROWS // 4
    stretches = [Read(0, NUM_ROWS, low, low + 600 + low // 20) for low in range(0, 7000, 1000)]
    own = Read(NUM_ROWS - num_own, NUM_ROWS, 8000, 8000 + num_own, offset=0)
    band, short = Read(100, 900, 9000, 10_000, 500, 300), Read(0, NUM_ROWS, 11_000, 11_050)
    reads = [*stretches, own, band, short, Read(5, 6, 11_100, 11_900)]
    rounds = varlen_plan.plan(
        reads, KEY_HEADS * GROUP, num_multiprocessors(place), needs_regular_shapes=kernels.source.needs_regular_shapes
    ).rounds
    assert rounds
    for dtype, tolerance in FLASH_TOLERANCES.items():
        for dim in place.dims:
            q = place.drawn(0, KEY_HEADS * GROUP, NUM_ROWS, dim, dtype=dtype).transpose(0, 1)
            k, v = (place.drawn(i, KEY_HEADS, NUM_KEYS, dim, dtype=dtype) for i in (1, 2))
            right = wanted(q, k, v, reads)
            k[:, 7950:8000], v[:, 7950:8000] = torch.nan, torch.nan
            assert_close(kernels.attend(q, k, v, Reads(reads), scale_of(q)), right, tolerance)


def chunks_have_the_same_bits_each_time(place: Place) -> None:
    """After any other work, and without a wait for the device."""
    place.needs_gpu()
    kernels, reads = FlashKernels.load(), [Read(0, NUM_ROWS, 0, 9000), Read(0, NUM_ROWS, 9000, 9000 + NUM_ROWS, 0)]
    q = place.drawn(0, NUM_ROWS, KEY_HEADS * GROUP, 128, dtype=torch.bfloat16)
    k, v = (place.drawn(i, KEY_HEADS, NUM_KEYS, 128, dtype=torch.bfloat16) for i in (1, 2))
    once = kernels.attend(q, k, v, Reads(reads), scale_of(q))
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [kernels.attend(q, k, v, Reads(reads), scale_of(q)) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in again:
        assert torch.equal(other.out_THD, once.out_THD)
        assert torch.equal(other.lse_TH, once.lse_TH)


def num_multiprocessors(place: Place) -> int:
    return torch.cuda.get_device_properties(place.device).multi_processor_count
