"""Safetensors files of zeros."""

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Writes a file of tensors by name, each with its type and shape."""
    header, size = dict[str, object](), 0
    for name, (dtype, shape) in tensors.items():
        end = size + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
