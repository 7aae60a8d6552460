"""A piece: some blocks of one segment, in order of position, as the bytes of one safetensors file.

Each part of a pool is a tensor [N, K, ...] of N blocks. The header states the positions and the required form of the
receiving pool. Slots past the end of a run are zeroed: their content may belong to another context, and equal contexts
must give equal bytes.

Shape letters: N blocks of a piece, K key heads.
"""

import warnings
from collections.abc import Iterable, Sequence
from math import prod

import msgspec
import torch
from torch import Tensor

from longleaf.errors import DataLoss
from longleaf.rank_protocol.snapshots import MAX_PIECE_BYTES, max_header_bytes
from longleaf.runs import Range, Run, ceil_div
from workers.host_copies import AsyncHostCopy, numbers_on, to_device
from workers.kv_cache.slots import KvPool

VERSION = "1"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
"""The dtype names of the safetensors format."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 8
"""Alignment of the data behind the header, in bytes."""


def form_of(pool: KvPool, *, of_windows: bool) -> str:
    """The form of a pool, which a piece and the receiving pool must share: the names, dtypes and sizes of all parts of
    a block. Empty where there are no such blocks.
    """
    parts = [
        f"{name} {DTYPES[tensor.dtype]} {'x'.join(map(str, (len(tensor), *tensor.shape[2:])))}"
        for name, tensor, _ in pool.blocks(of_windows=of_windows)
    ]
    size = pool.window_block_size if of_windows else pool.block_size
    return "; ".join([f"blocks of {size}", *parts]) if parts else ""


class HostCopy:
    """Blocks of a pool, copied to the host; independent of later changes of the pool."""

    def __init__(self, pool: KvPool, runs: Sequence[Run], *, of_windows: bool) -> None:
        """Raises ValueError for more blocks than a piece may have."""
        self._form = form_of(pool, of_windows=of_windows)
        self._runs = runs
        found = pool.blocks(of_windows=of_windows)
        blocks = [block for run in runs for block in run.blocks]
        size = sum(tensor[:, 0].numel() * tensor.itemsize for _, tensor, _ in found)
        if len(blocks) > 1 and len(blocks) * size > MAX_PIECE_BYTES and not of_windows:
            raise ValueError(f"{len(blocks)} blocks of {size} bytes are more than a piece may have")
        index_N = numbers_on(pool.device, blocks)
        coming = [AsyncHostCopy(tensor.transpose(0, 1).index_select(0, index_N)) for _, tensor, _ in found]
        self._tensors = [(part.name, copy.wait()) for part, copy in zip(found, coming, strict=True)]
        for (_, copied), part in zip(self._tensors, found, strict=True):
            if part.has_slots:
                self._blank(copied, pool.window_block_size if of_windows else pool.block_size)

    def _blank(self, copied_NKS: Tensor, block_size: int) -> None:
        """Zeros the slots past the end of each run."""
        end = 0
        for run in self._runs:
            end += len(run.blocks)
            num_filled = len(run) - (len(run.blocks) - 1) * block_size
            copied_NKS[end - 1, :, num_filled:] = 0

    def parts(self) -> list[bytes | memoryview]:
        """The bytes of the file, without copying the tensors again."""
        views = [tensor.flatten().view(torch.uint8).numpy().data for _, tensor in self._tensors]
        positions = _format_positions(run.range for run in self._runs)
        header: dict[str, object] = {"__metadata__": {"version": VERSION, "form": self._form, "positions": positions}}
        end = 0
        for (name, tensor), view in zip(self._tensors, views, strict=True):
            start, end = end, end + len(view)
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % ALIGNMENT)
        return [len(text).to_bytes(8, "little"), text, *views]


class KvPiece:
    """The content of a piece, on the host, for a pool of the same form."""

    def __init__(self, name: str, data: bytes, pool: KvPool, ranges: Sequence[Range], *, of_windows: bool) -> None:
        """`ranges` are the positions [start, end) that the manifest names; `of_windows` selects the blocks of `pool`
        that they go to.

        Raises DataLoss unless `data` has exactly the tensors of this number of blocks of the pool. Names, dtypes,
        shapes and sizes are compared before a tensor is made or a block is listed, since an imported archive may state
        any.
        """
        parts = pool.blocks(of_windows=of_windows)
        if not parts:
            raise DataLoss(name, "it is from a pool with another layout")
        self._block_size = pool.window_block_size if of_windows else pool.block_size
        num_blocks = sum(ceil_div(high - low, self._block_size) for low, high in ranges)
        size = num_blocks * sum(tensor[:, 0].numel() * tensor.itemsize for _, tensor, _ in parts)
        try:
            header = _header(data, max_header_bytes(len(parts), len(ranges)))
            metadata = msgspec.convert(header.pop("__metadata__"), dict[str, str])
            described = {name: msgspec.convert(one, _Described) for name, one in header.items()}
            positions = metadata["positions"]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, KeyError) as error:
            raise DataLoss(name, f"it is not a piece of a snapshot: {error}") from error
        if metadata.get("version") != VERSION:
            raise DataLoss(name, f"its version is {metadata.get('version')}, and this service reads {VERSION}")
        if metadata.get("form") != form_of(pool, of_windows=of_windows):
            raise DataLoss(name, "it is from a pool with another layout")
        if positions != _format_positions(ranges):
            raise DataLoss(name, "its positions differ from those in its manifest")
        if len(data) - _end_of_header(data) != size:
            message = f"its tensors have {len(data) - _end_of_header(data):,} bytes"
            raise DataLoss(name, f"{message}, and {num_blocks:,} blocks have {size:,}")
        expected, end = dict[str, _Described](), 0
        for part in parts:
            shape = [num_blocks, len(part.tensor), *part.tensor.shape[2:]]
            start, end = end, end + prod(shape) * part.tensor.itemsize
            expected[part.name] = _Described(DTYPES[part.tensor.dtype], shape, (start, end))
        if described != expected:
            wrong = next(name for name in (*described, *expected) if described.get(name) != expected.get(name))
            raise DataLoss(
                name, f"its tensor {wrong[:100]!r} does not have the shape of {num_blocks:,} blocks of the pool"
            )
        self.of_windows = of_windows
        self._places = dict(_places(ranges, self._block_size))
        is_pinned = pool.device.startswith("cuda")  # pinned now, and not while a step waits
        tensors = {name: _view(data, one) for name, one in described.items()}
        self._tensors = {name: tensor.pin_memory() if is_pinned else tensor for name, tensor in tensors.items()}

    def find(self, runs: Iterable[Run]) -> list[int] | None:
        """The indices of the blocks of runs in the piece; None unless it has each of them as a whole."""
        found: list[int] = []
        for run in runs:
            for start in range(run.start, run.end, self._block_size):
                number, end = self._places.get(start, (0, None))
                if end != min(start + self._block_size, run.end):
                    return None
                found.append(number)
        return found

    def restore(self, pool: KvPool, numbers: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies blocks of the piece to blocks of a pool."""
        index_N = numbers_on(pool.device, blocks)
        first, count = numbers[0], len(numbers)
        are_neighbours = list(numbers) == list(range(first, first + count))
        for name, tensor, _ in pool.blocks(of_windows=self.of_windows):
            retained = self._tensors[name]
            chosen = retained[first : first + count] if are_neighbours else retained[list(numbers)]
            tensor.index_copy_(1, index_N, to_device(chosen, pool.device).transpose(0, 1))


class _Described(msgspec.Struct, frozen=True):
    """A tensor, as the header of a file describes it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _header(data: bytes, max_bytes: int) -> dict[str, dict[str, object]]:
    """Parses the header. Raises ValueError if it is longer than `max_bytes`, and msgspec.DecodeError if it is not
    valid.
    """
    if (size := _end_of_header(data) - 8) > min(max_bytes, len(data)):
        raise ValueError(f"its header has {size:,} bytes")
    return msgspec.json.decode(data[8 : 8 + size], type=dict[str, dict[str, object]])


def _end_of_header(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _format_positions(ranges: Iterable[Range]) -> str:
    return " ".join(f"{start}-{end}" for start, end in ranges)


def _view(data: bytes, described: _Described) -> Tensor:
    """The tensor as a view of the file: the safetensors library would copy it, and a restore has gigabytes of
    tensors.
    """
    dtype, place = TYPES[described.dtype], _end_of_header(data) + described.data_offsets[0]
    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # the buffer is never written
    return torch.frombuffer(data, dtype=dtype, count=prod(described.shape), offset=place).view(described.shape)


def _places(ranges: Iterable[tuple[int, int]], block_size: int) -> Iterable[tuple[int, tuple[int, int]]]:
    """The index of each block in the piece, and its end position, by its start position."""
    number = 0
    for low, high in ranges:
        for i in range(ceil_div(high - low, block_size)):
            start = low + i * block_size
            yield start, (number, min(start + block_size, high))
            number += 1
