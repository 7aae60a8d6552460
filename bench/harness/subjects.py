"""The models that are measured."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from longleaf.config import embedded_model
from zoo.checkpoints import make_checkpoint

RANDOM_LLAMA = "random-llama"
EMBEDDED = "embedded"
RANDOM_GEMMA3 = "random-gemma3"
NAMES = (RANDOM_LLAMA, EMBEDDED)


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint under its name in the results."""

    name: str
    folder: Path
    vocab_size: int
    max_positions: int

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Random ids, none of them special."""
        return Random(seed).choices(range(3, min(self.vocab_size, 256)), k=count)


@contextmanager
def subject(name: str) -> Iterator[Subject]:
    """The checkpoint called `name`; a random one is made, and removed in the end."""
    if name == EMBEDDED:
        yield _read(name, embedded_model())
        return
    make = _make_random_gemma3 if name == RANDOM_GEMMA3 else _make_random_llama
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        yield _read(name, make(Path(folder, name)))  # which services call it by


@contextmanager
def checkpoint(named: str) -> Iterator[Path]:
    """The folder of the model of that name, or that folder."""
    if named not in NAMES:
        yield Path(named)
        return
    with subject(named) as measured:
        yield measured.folder


def subject_of(folder: Path) -> Subject:
    """The checkpoint in a folder, which is called by the name of the folder."""
    return _read(folder.name, folder)


def is_there(name: str) -> bool:
    """Whether the model can be measured; the embedded one may be missing from a checkout."""
    return name != EMBEDDED or (embedded_model() / "config.json").is_file()


def _make_random_llama(folder: Path) -> Path:
    """8 layers of 512, 8 query heads and 2 key heads of 64, float32: large enough that arithmetic dominates."""
    return make_checkpoint(
        folder, "llama", num_layers=8, hidden=512, num_heads=8, num_kv_heads=2, ffn=1408, max_positions=131072
    )


def _make_random_gemma3(folder: Path) -> Path:
    """6 layers of 512, 4 query heads and 1 key head of 256, float32; as in Gemma 3 1B five layers with a window of 512
    before one without."""
    make_checkpoint(
        folder,
        "gemma3",
        num_layers=6,
        hidden=512,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        ffn=1408,
        max_positions=131072,
    )
    file = folder / "config.json"
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    changed = json.loads(file.read_text()) | {"sliding_window": 512, "layer_types": kinds}
    file.write_text(json.dumps(changed, indent=2))
    return folder


def _read(name: str, folder: Path) -> Subject:
    config = json.loads((folder / "config.json").read_text())
    return Subject(name, folder, config["vocab_size"], config["max_position_embeddings"])
