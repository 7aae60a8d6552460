"""Reads the slices of a checkpoint's weights that belong to a share, through the conversions of transformers.

Transformers renames, converts and assigns tensors of a checkpoint that it reads on demand. Here it receives objects
that read only slices. Slices are read with pread: over memory maps, the kernel reads ahead, and a rank that needs a
quarter of a file brings nearly all of it into memory.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from longleaf.config import DtypeName, apply_environment, loading_environment
from longleaf.errors import ModelRefused
from longleaf.fingerprint import LENGTH_BYTES, MAX_HEADER_BYTES, weight_files
from longleaf.kernels.cpu.quantized_linear import NativeQuantizedLinear, QuantizedLinear
from longleaf.model_report import describe_layouts
from workers.model.quantized_weights import (
    NUMBERS,
    DequantizedTensor,
    Quantization,
    StoredTensor,
    dequantize,
    layouts,
)
from workers.model.stored_layers import LayerWithoutWeight, stored_layers
from workers.model.weight_shares import Cut, Share, take

log = logging.getLogger("longleaf.weights")  # messages logged while a rank loads are shown to users
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors files."""
MAX_READ = 1 << 30
"""Maximum bytes of one read. Linux reads at most 2 GiB at once."""

Ranges = Sequence[tuple[int, int]]
Target = tuple[str, str | None]
"""A parameter, and the pattern of the converter that makes it; None: the tensor is only renamed."""


class _Location(msgspec.Struct, frozen=True):
    """The location of a tensor according to the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class WeightReader:
    """Reads tensors, or slices of them, from open safetensors files. Counts the bytes that it reads."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, descriptor: int, start: int, buffer: memoryview) -> None:
        """Fills the buffer from an open file. Raises ValueError at the end of the file."""
        filled = 0
        while filled < len(buffer):
            count = os.preadv(descriptor, [buffer[filled : filled + MAX_READ]], start + filled)
            if not count:
                raise ValueError("a file of weights ends before its last tensor")
            filled += count
        self.num_bytes += filled


class TensorSlice:
    """A tensor of a checkpoint, or the slice that belongs to a share; any index reads it. Stands in for the slices of
    the safetensors library.
    """

    def __init__(self, reader: WeightReader, descriptor: int, start: int, location: _Location) -> None:
        """`start` is the position in the file of the first byte after the header."""
        self._reader = reader
        self._descriptor = descriptor
        self._start = start + location.data_offsets[0]
        self._location = location
        self._dim = 0
        self._ranges: Ranges | None = None

    def restricted_to(self, dim: int, ranges: Ranges) -> "TensorSlice":
        """The slice with these ranges of a dim."""
        found = TensorSlice(self._reader, self._descriptor, 0, self._location)
        found._start, found._dim, found._ranges = self._start, dim, ranges
        return found

    def get_shape(self) -> list[int]:
        """The shape of the tensor in the file."""
        return list(self._location.shape)

    def get_dtype(self) -> str:
        """The dtype, as safetensors files name it."""
        return self._location.dtype

    def __getitem__(self, index: object) -> Tensor:
        """Reads the slice for any index."""
        shape = self.get_shape()
        ranges = [(0, shape[self._dim])] if self._ranges is None and shape else self._ranges or [(0, 1)]
        if shape:
            shape[self._dim] = sum(end - start for start, end in ranges)
        found = torch.empty(shape, dtype=DTYPES[self._location.dtype])
        if found.numel():
            self._fill(found, ranges)
        return found

    def _fill(self, found: Tensor, ranges: Ranges) -> None:
        """Reads the ranges of the dim, for each index of the dims before it; all of the tensor at once."""
        full = self._location.shape or (1,)
        inner = prod(full[self._dim + 1 :]) * found.itemsize
        numbers: Any = found.view(-1).view(torch.uint8).numpy()
        buffer = memoryview(numbers)
        if list(ranges) == [(0, full[self._dim])]:
            self._reader.read(self._descriptor, self._start, buffer)
            return
        filled = 0
        for outer in range(prod(full[: self._dim])):
            first = self._start + outer * full[self._dim] * inner
            for start, end in ranges:
                count = (end - start) * inner
                self._reader.read(self._descriptor, first + start * inner, buffer[filled : filled + count])
                filled += count


@contextmanager
def open_weights(folder: Path, *, is_unique: bool = False) -> Iterator[tuple[dict[str, TensorSlice], WeightReader]]:
    """The tensors of a checkpoint by name, readable in the body, and their reader. Raises ModelRefused, with
    `is_unique` also for a tensor that is in two files.
    """
    reader, tensors = WeightReader(), dict[str, TensorSlice]()
    with ExitStack() as stack:
        for name in weight_files(folder):
            try:
                descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                found = _read_header(reader, descriptor)
                if is_unique and (twice := sorted(tensors.keys() & found)):
                    raise ValueError(f"tensor {twice[0]} is in another file as well")
                tensors |= found
            except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
                raise ModelRefused(f"{folder / name} cannot be read: {error}") from error
        yield tensors, reader


def _read_header(reader: WeightReader, descriptor: int) -> dict[str, TensorSlice]:
    """The tensors of an open file. Raises ValueError, or KeyError for an unknown dtype."""
    if hasattr(os, "posix_fadvise"):  # slices only: reading ahead would read the others
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    start = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    header = msgspec.json.decode(os.pread(descriptor, length, LENGTH_BYTES), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    size = os.fstat(descriptor).st_size - start
    found = dict[str, TensorSlice]()
    for name, entry in header.items():
        location = msgspec.json.decode(entry, type=_Location)
        begin, end = location.data_offsets
        if end - begin != prod(location.shape) * DTYPES[location.dtype].itemsize:
            raise ValueError(f"tensor {name} has {end - begin:,} bytes, which is not the size of its shape")
        if end > size:
            raise ValueError(f"it ends {end - size:,} bytes before the end of tensor {name}")
        found[name] = TensorSlice(reader, descriptor, start, location)
    return found


def dtype_of(
    folder: str, config: PreTrainedConfig, wanted: DtypeName, quantization: Quantization | None = None
) -> DtypeName:
    """The wanted dtype, or that of the config. If neither is named, it is bfloat16 for quantized weights, and otherwise
    that of the first floating-point tensor, as in transformers.
    """
    if wanted != "auto" or config.dtype is not None:
        return wanted
    if quantization is not None:
        return "bfloat16"
    with open_weights(Path(folder)) as (tensors, _):
        dtypes = [DTYPES[tensor.get_dtype()] for tensor in tensors.values()]
    first: Any = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    return str(first).removeprefix("torch.")  # pyright: ignore[reportReturnType]


def check_types(folder: Path, quantization: Quantization | None) -> None:
    """Raises ModelRefused for numbers of 8 bits if the config describes no quantization: their scales would be ignored,
    and the weights would be wrong.
    """
    if quantization is not None:
        return
    with open_weights(folder) as (tensors, _):
        for name, dtype in ((name, tensor.get_dtype()) for name, tensor in tensors.items()):
            if dtype in NUMBERS:
                raise ModelRefused(f"{name} has the type {dtype}, but the config has no quantization_config")


def quantized_layouts(folder: Path, quantization: Quantization | None) -> dict[str, int]:
    """The number of quantized tensors of a checkpoint by layout, according to the headers of its files. Raises
    ModelRefused for tensors of an unknown layout.
    """
    if quantization is None:
        return {}
    with open_weights(folder, is_unique=True) as (tensors, _):
        return layouts(dequantize(tensors, quantization, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class LoadedShare:
    """The outcome of reading a share of the weights."""

    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, Any, Any], ...]
    num_bytes: int
    """Bytes read from files."""
    layouts: tuple[str, ...] = ()
    """Layouts of the quantized weights of the checkpoint, the most frequent first."""


def read_share(
    module: PreTrainedModel,
    folder: Path,
    cuts: dict[str, Cut],
    share: Share,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    *,
    kernel: NativeQuantizedLinear | None = None,
    only_divided: bool = False,
) -> LoadedShare:
    """Reads a share of the weights into `module`, whose parameters are on the meta device and have their full shapes.
    Parameters that no cut names are read in full, or with `only_divided` stay on the meta device, as do parameters
    that are tied to others. Quantized weights are dequantized; with `kernel`, those of linear layers remain as stored
    if the kernel supports their layout. Raises ModelRefused and the errors of transformers.
    """
    mapping: Any = get_model_conversion_mapping(module)
    with open_weights(folder, is_unique=quantization is not None) as (stored, reader):
        tensors = stored if quantization is None else dequantize(stored, quantization, dtype)
        counts = layouts(tensors)
        if quantization is not None:
            log.info("weights: %s", describe_layouts(counts, str(dtype).removeprefix("torch.")))
        targets = _targets(module, mapping, tensors)
        converters = {name: _converter(mapping, pattern) for name, (_, pattern) in targets.items()}
        # other conversions need all of a tensor, which is cut afterwards
        late = {
            target
            for name, (target, _) in targets.items()
            if target in cuts and not _keeps_slices(converters[name], cuts[target])
        }
        early = {name: cut for name, cut in cuts.items() if name not in late}
        full = module.state_dict()
        shapes = {name: tuple(parameter.shape) for name, parameter in full.items()}
        for name, cut in early.items():
            _replace_parameter(module, name, full[name].new_empty(cut.shape(shapes[name], share)))
        slices = {
            name: _restricted(tensor, *targets[name], converters[name], early, shapes, share)
            for name, tensor in tensors.items()
            if targets[name][0] in cuts or not only_divided
        }
        remaining = dict[str, DequantizedTensor]()
        if kernel is not None:
            remaining, note = stored_layers(module, {name: (slices[name], *targets[name]) for name in slices}, cuts)
            log.info("weights: %s", note)
            slices = {name: tensor for name, tensor in slices.items() if targets[name][0] not in remaining}
            for name in remaining:
                _replace_module(module, name, LayerWithoutWeight(module.get_submodule(_owner(name))))
        config = LoadStateDictConfig(
            pretrained_model_name_or_path=str(folder),
            ignore_mismatched_sizes=True,  # they are refused by name
            dtype=dtype,
            dtype_plan=module._get_dtype_plan(dtype),
            weight_mapping=mapping,
            device_map={"": "cpu"},
        )
        apply_environment(loading_environment())  # one tensor at a time, so that the host holds at most one beside them
        # private functions of transformers, which `from_pretrained` calls in this order
        info, _ = type(module)._load_pretrained_model(module, slices, None, config)
        if not only_divided:
            info = type(module)._finalize_model_loading(module, config, info)
        for name in late:
            _replace_parameter(module, name, take(module.get_parameter(name), cuts[name], share))
        checked = set[tuple[object, ...]]()
        for name, tensor in remaining.items():
            assert kernel is not None
            bias: Any = module.get_submodule(_owner(name)).bias
            matrix = tensor.matrix()
            kind = matrix.kind, matrix.shape, matrix.group, matrix.scales.dtype, matrix.zeros is None
            if kind not in checked:
                kernel.check(matrix)
                checked.add(kind)
            _replace_module(module, name, QuantizedLinear(matrix, bias, dtype, kernel))
    return LoadedShare(tuple(info.missing_keys), tuple(info.mismatched_keys), reader.num_bytes, tuple(counts))


def targets_of(module: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The parameter that each tensor of a checkpoint becomes, or is a part of."""
    mapping: Any = get_model_conversion_mapping(module)
    return {name: target for name, (target, _) in _targets(module, mapping, names).items()}


def input_units(module: PreTrainedModel, folder: Path, quantization: Quantization) -> dict[str, int]:
    """The number of inputs of which parts of weights have a multiple if they remain as stored, by their parameter."""
    return {name: tensor.input_unit for name, tensor in _remaining(module, folder, quantization).items()}


def stored_sizes(module: PreTrainedModel, folder: Path, quantization: Quantization) -> dict[str, float]:
    """Bytes per number of the weights that may remain as stored, by their parameter."""
    return {name: tensor.bytes_per_number for name, tensor in _remaining(module, folder, quantization).items()}


def _remaining(module: PreTrainedModel, folder: Path, quantization: Quantization) -> dict[str, DequantizedTensor]:
    mapping: Any = get_model_conversion_mapping(module)
    with open_weights(folder, is_unique=True) as (stored, _):
        tensors = dequantize(stored, quantization, module.dtype)
        targets = _targets(module, mapping, tensors)
        found, _ = stored_layers(module, {name: (tensor, *targets[name]) for name, tensor in tensors.items()}, {})
    return found


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _replace_module(module: nn.Module, parameter: str, replacement: nn.Module) -> None:
    """Replaces the layer with this parameter."""
    module.set_submodule(_owner(parameter), replacement)


def _replace_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))


def _targets(module: PreTrainedModel, mapping: Sequence[Any], names: Iterable[str]) -> dict[str, Target]:
    """The parameter that each tensor of a checkpoint becomes, or is a part of, and the pattern of its converter."""
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known, prefix = module.state_dict(), module.base_model_prefix
    found = dict[str, Target]()
    for name in names:
        found[name] = rename_source_key(name, renamings, converters, prefix, known)
        if found[name][0] not in known and name in known:  # as transformers does
            found[name] = rename_source_key(name, [], [], prefix, known)
    return found


def _converter(mapping: Sequence[Any], pattern: str | None) -> WeightConverter | None:
    if pattern is None:
        return None
    return next(one for one in mapping if isinstance(one, WeightConverter) and pattern in one.source_patterns)


def _keeps_slices(converter: WeightConverter | None, cut: Cut) -> bool:
    """Whether a conversion of slices gives the slice of the conversion."""
    if converter is None:
        return True
    for operation in converter.operations:
        if isinstance(operation, Concatenate):
            if operation.dim == cut.dim and cut.num_blocks != len(converter.source_patterns):
                return False
        elif not isinstance(operation, MergeModulelist) or operation.dim != 0 or cut.dim == 0:
            return False
    return True


def _restricted(
    tensor: StoredTensor,
    target: str,
    pattern: str | None,
    converter: WeightConverter | None,
    cuts: dict[str, Cut],
    shapes: dict[str, tuple[int, ...]],
    share: Share,
) -> StoredTensor:
    """The slice of a tensor that is needed for a share of its parameter `target`."""
    if target not in cuts:
        return tensor
    dim = cuts[target].dim
    ranges = cuts[target].ranges(shapes[target][dim], share)
    if converter is None or pattern is None:
        return tensor.restricted_to(dim, ranges)
    is_stacked = any(isinstance(one, MergeModulelist) for one in converter.operations)
    concatenated = [one.dim for one in converter.operations if isinstance(one, Concatenate)]
    if dim in concatenated:  # the sources are one after the other in the parameter
        number, count = converter.source_patterns.index(pattern), len(converter.source_patterns)
        size = shapes[target][dim] // count
        ranges = [(start - number * size, end - number * size) for start, end in ranges if start // size == number]
    return tensor.restricted_to(dim - 1 if is_stacked else dim, ranges)
