"""Random Llamas of several sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.harness.subjects import Subject, subject_of
from zoo.checkpoints import make_checkpoint

LARGE, SMALL, WIDE = "random-llama-570mb", "random-llama-19mb", "random-llama-wide"
"""Named by their size in float32, or for wide matrices: 540 MB in 16 bits."""
SHAPES: dict[str, dict[str, Any]] = {
    LARGE: {"num_layers": 8, "hidden": 1280, "num_heads": 10, "num_kv_heads": 2, "ffn": 3584},
    SMALL: {"num_layers": 6, "hidden": 256, "num_heads": 4, "num_kv_heads": 2, "ffn": 768},
    WIDE: {"num_layers": 6, "hidden": 2048, "num_heads": 16, "num_kv_heads": 4, "ffn": 5632},
}


@contextmanager
def random_llama(name: str) -> Iterator[Subject]:
    """The checkpoint of this name, which is removed in the end."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        yield subject_of(make_llama(Path(folder, name), name))


def make_llama(folder: Path, name: str, *, is_16_bit: bool = False) -> Path:
    """Writes the checkpoint of this name, in float32 or bfloat16."""
    make_checkpoint(folder, "llama", initializer_range=0.02, **SHAPES[name])
    if is_16_bit:
        file, config = folder / "model.safetensors", folder / "config.json"
        weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return folder
