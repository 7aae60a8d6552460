"""The changes of a model folder that the fingerprint detects, and those that it is documented not to detect."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from longleaf.config import embedded_model
from longleaf.errors import ModelRefused
from longleaf.fingerprint import INDEX, MAX_NAME_BYTES, PIECE_BYTES, SINGLE, TEXTS, read_fingerprint, read_texts

LARGE = 5 * PIECE_BYTES
"""The size of a tensor that is only sampled."""
SMALL = 3 * PIECE_BYTES
Tensors = dict[str, np.ndarray]


def tensors() -> Tensors:
    random = np.random.default_rng(0)
    sizes = {"large": LARGE, "small": SMALL}
    return {name: random.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()} | {
        "table": random.standard_normal((3, 4)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TEXTS:
        (tmp_path / name).write_text(json.dumps({"file": name}))
    save_file(tensors(), tmp_path / SINGLE)
    return tmp_path


def with_bytes(name: str, at: int) -> Callable[[Path], None]:
    """Changes a byte of a tensor; `at` may count from its end."""

    def change(folder: Path) -> None:
        found = tensors()
        found[name][at] ^= 1
        save_file(found, folder / SINGLE)

    return change


def with_tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    return lambda folder: save_file(change(tensors()), folder / SINGLE)


def renamed(found: Tensors) -> Tensors:
    return {"larger" if name == "large" else name: tensor for name, tensor in found.items()}


MIDDLE = (LARGE - PIECE_BYTES) // 2
WEIGHTS: dict[str, Callable[[Path], None]] = {
    "first byte": with_bytes("large", 0),
    "end of the first piece": with_bytes("large", PIECE_BYTES - 1),
    "middle": with_bytes("large", MIDDLE),
    "end of the middle": with_bytes("large", MIDDLE + PIECE_BYTES - 1),
    "beginning of the last piece": with_bytes("large", -PIECE_BYTES),
    "last byte": with_bytes("large", -1),
    "anywhere in a small one": with_bytes("small", PIECE_BYTES + 7),
    "name": with_tensors(renamed),
    "shape": with_tensors(lambda found: found | {"table": found["table"].reshape(4, 3)}),
    "shape of an empty one": with_tensors(lambda found: found | {"empty": found["empty"].reshape(4, 0)}),
    "type": with_tensors(lambda found: found | {"table": found["table"].view(np.int32)}),
    "one more": with_tensors(lambda found: found | {"more": np.zeros(1, np.float32)}),
    "one less": with_tensors(lambda found: {name: found[name] for name in ("large", "small", "empty")}),
}


@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS)
def test_changes_of_a_tensor_are_detected(folder: Path, change: Callable[[Path], None]) -> None:
    before = read_fingerprint(folder)
    change(folder)
    after = read_fingerprint(folder)
    assert after.digest != before.digest
    assert {name for name in before.files if before.files[name] != after.files[name]} == {SINGLE}


@pytest.mark.parametrize("name", TEXTS)
def test_changes_of_a_text_file_are_detected(folder: Path, name: str) -> None:
    before = read_fingerprint(folder)
    (folder / name).write_text(json.dumps({"file": name}) + " ")
    changed = read_fingerprint(folder)
    assert changed.digest != before.digest
    assert {name for name in before.files if before.files[name] != changed.files[name]} == {name}
    if name != "config.json":
        (folder / name).unlink()
        lacking = read_fingerprint(folder)
        assert lacking.digest not in (before.digest, changed.digest)
        assert before.files.keys() - lacking.files.keys() == {name}


def test_swapped_text_files_are_detected(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "saved")
    before = read_fingerprint(folder)
    (folder / "tokenizer_config.json").rename(folder / "tokenizer.json")
    assert read_fingerprint(folder).digest != before.digest


UNSEEN: dict[str, Callable[[Path], None]] = {
    "between the pieces": with_bytes("large", PIECE_BYTES + 7),
    "other files": lambda folder: (folder / "README.md").write_text("about it") and None,
    "metadata of the weights": lambda folder: save_file(tensors(), folder / SINGLE, {"format": "pt"}),
    "files that are not loaded": lambda folder: save_file(renamed(tensors()), folder / "consolidated.safetensors"),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_documented_exceptions_are_not_detected(folder: Path, change: Callable[[Path], None]) -> None:
    """If this ever changes, the fingerprint's documentation must change."""
    before = read_fingerprint(folder)
    change(folder)
    assert read_fingerprint(folder) == before


def deal(folder: Path, files: dict[str, list[str]], *, named_by: str = INDEX) -> None:
    """The same tensors in several files."""
    found = tensors()
    for file, names in files.items():
        save_file({name: found[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / named_by).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / SINGLE).unlink(missing_ok=True)


def test_equal_tensors_in_other_files_have_the_same_fingerprint(folder: Path) -> None:
    before = read_fingerprint(folder)
    deal(folder, {"a.safetensors": ["large", "table"], "b.safetensors": ["small", "empty"]})
    after = read_fingerprint(folder)
    assert after.digest == before.digest
    assert after.files.keys() - TEXTS == {"a.safetensors", "b.safetensors"}


def test_last_file_of_a_repeated_tensor_counts(folder: Path) -> None:
    """The last file is used: the same bytes in files of other names are another model."""
    (folder / SINGLE).unlink()
    weight_map = {"w": "a.safetensors", "v": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    digests: list[str] = []
    for values in (0, 1), (1, 0):
        for name, value in zip(weight_map.values(), values, strict=True):
            save_file({"w": np.full(8, value, np.float32)}, folder / name)
        digests.append(read_fingerprint(folder).digest)
    assert digests[0] != digests[1]


def test_weights_named_by_the_config_count(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "mine.safetensors"}))
    save_file(renamed(tensors()), folder / "mine.safetensors")
    first = read_fingerprint(folder)
    (folder / SINGLE).unlink()
    assert read_fingerprint(folder) == first
    assert "mine.safetensors" in first.files


def test_many_weight_files_are_reported_by_their_index(folder: Path) -> None:
    """The fingerprint fits into one message."""
    stem = "x" * 200
    many = MAX_NAME_BYTES // len(stem) + 1
    save_file({"one": np.zeros(4, np.float32)}, folder / "one")
    for number in range(many):
        os.link(folder / "one", folder / f"{stem}{number}.safetensors")
    weight_map = {str(number): f"{stem}{number}.safetensors" for number in range(many)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / SINGLE).unlink()
    assert read_fingerprint(folder).files.keys() == {*TEXTS, INDEX}


def test_folder_without_weights_has_a_fingerprint(folder: Path) -> None:
    with_weights = read_fingerprint(folder)
    (folder / SINGLE).unlink()
    without = read_fingerprint(folder)
    assert without.digest != with_weights.digest
    assert without.files == read_texts(folder)


def cut(count: int) -> Callable[[Path], None]:
    """Keeps `count` bytes of the weights, from the end if negative."""
    return lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:count]) and None


def header(content: object) -> Callable[[Path], None]:
    return lambda folder: write_header(folder, json.dumps(content).encode())


def write_header(folder: Path, data: bytes) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(data)) + data)


NAMED = json.dumps({"transformers_weights": "x" * 5000 + ".safetensors"})
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut(-1), SINGLE),
    "in its header": (cut(20), SINGLE),
    "in its length": (cut(3), SINGLE),
    "empty": (lambda folder: (folder / SINGLE).write_bytes(b""), SINGLE),
    "no header": (lambda folder: (folder / SINGLE).write_bytes(b"\xff" * 100), SINGLE),
    "a list": (header([]), SINGLE),
    "offsets": (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}), SINGLE),
    "before the data": (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), SINGLE),
    "no shape": (header({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), SINGLE),
    "nested": (lambda folder: write_header(folder, b'{"a":' + b"[" * 100_000), SINGLE),
    "no such size": (header({"a": {"dtype": "F32", "shape": [1 << 70], "data_offsets": [0, 0]}}), SINGLE),
    "a long name": (lambda folder: (folder / "config.json").write_text(NAMED), "x{200}"),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "index": (lambda folder: deal(folder, {}) or (folder / INDEX).write_text("[]"), INDEX),
    "a missing file": (lambda folder: deal(folder, {"a.safetensors": []}) or deal_gone(folder), "gone.safetensors"),
}


def deal_gone(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"large": "gone.safetensors"}}))


@pytest.mark.parametrize(("change", "file"), BROKEN.values(), ids=BROKEN)
def test_unreadable_file_is_named(folder: Path, change: Callable[[Path], object], file: str) -> None:
    change(folder)
    with pytest.raises(ModelRefused, match=file):
        read_fingerprint(folder)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="gone does not exist"):
        read_fingerprint(tmp_path / "gone")
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        read_fingerprint(tmp_path)


def test_only_samples_of_the_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces of each tensor are read, regardless of its size."""
    (folder / SINGLE).unlink()
    reported = json.dumps({"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}).encode()
    with (folder / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(reported)) + reported)
        file.truncate(8 + len(reported) + (1 << 40))  # takes no room
    counts: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, count, at: counts.append(count) or pread(descriptor, count, at))
    read_fingerprint(folder)
    assert counts == [8, len(reported), *[PIECE_BYTES] * 3]


def test_embedded_model_has_a_fingerprint() -> None:
    found = read_fingerprint(embedded_model())
    assert len(found.digest) == 64
    assert found.files.keys() >= {"config.json", "tokenizer.json", SINGLE}
