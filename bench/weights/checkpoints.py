"""Random Llamas in float32 of several sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness.subjects import Subject, subject_of
from zoo.checkpoints import make_checkpoint

LARGE, SMALL = "random-llama-570mb", "random-llama-19mb"
SHAPES: dict[str, dict[str, Any]] = {
    LARGE: {"num_layers": 8, "hidden": 1280, "num_heads": 10, "num_kv_heads": 2, "ffn": 3584},
    SMALL: {"num_layers": 6, "hidden": 256, "num_heads": 4, "num_kv_heads": 2, "ffn": 768},
}


@contextmanager
def random_llama(name: str) -> Iterator[Subject]:
    """The checkpoint of this name, which is removed in the end."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        yield subject_of(make_checkpoint(Path(folder, name), "llama", initializer_range=0.02, **SHAPES[name]))
