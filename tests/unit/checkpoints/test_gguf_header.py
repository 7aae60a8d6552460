"""Headers of GGUF files. Hostile ones are refused with one sentence, and in little memory."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from longleaf.checkpoints.gguf_header import GgufTensor, read_header
from longleaf.errors import ModelRefused
from tests.support.gguf_files import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    STRING,
    U32,
    entry,
    gguf_bytes,
    tensor,
    text,
    write_llama,
)

HUGE = 1 << 62
MAX_BYTES = 4 << 20
"""Of memory for a refusal."""


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def number(name: str, value: int) -> bytes:
    return entry(name, U32, struct.pack("<I", value))


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return entry("list", ARRAY, struct.pack("<IQ", kind, count) + content)


def test_header_of_a_model(tmp_path: Path) -> None:
    found = read_header(write_llama(tmp_path / "tiny.gguf"))
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.block_count"] == 2
    assert found.kinds == {"Q8_0": 8, "Q4_0": 8, "F32": 5}
    by_name = {each.name: each for each in found.tensors}
    assert by_name["blk.1.attn_k.weight"].shape == (32, 64)
    assert by_name["blk.1.attn_k.weight"].num_elements == 2048
    assert max(each.end for each in found.tensors) <= (tmp_path / "tiny.gguf").stat().st_size


def test_tensors_are_located(tmp_path: Path) -> None:
    content = gguf_bytes(tensors=[tensor("a", (2, 3)), tensor("b", (32,), 2, 64)])
    begin = len(content) - 128
    assert read_header(write(tmp_path, content)).tensors == (
        GgufTensor("a", (3, 2), "F32", 6, begin, begin + 24),
        GgufTensor("b", (32,), "Q4_0", 32, begin + 64, begin + 82),
    )


def test_alignment_is_that_of_the_metadata(tmp_path: Path) -> None:
    content = gguf_bytes([ARCHITECTURE, number("general.alignment", 1024)], num_bytes=4096)
    (found,) = read_header(write(tmp_path, content)).tensors
    assert (found.begin, found.end) == (1024, 1152)


def test_digest_covers_header_and_samples(tmp_path: Path) -> None:
    content = gguf_bytes()
    digest = read_header(write(tmp_path, content)).digest
    assert read_header(write(tmp_path, content)).digest == digest
    assert read_header(write(tmp_path, content[:-1] + b"!")).digest != digest
    changed = bytearray(content)
    changed[len(content) - 128] ^= 1
    assert read_header(write(tmp_path, bytes(changed))).digest != digest
    assert read_header(write(tmp_path, gguf_bytes([ARCHITECTURE, number("x", 1)]))).digest != digest


HOSTILE = {
    "another format": (gguf_bytes(magic=b"PK\3\4"), "it does not begin with GGUF"),
    "nothing": (b"", "it does not begin with GGUF"),
    "only the magic": (b"GGUF", "it ends within its header"),
    "version 1": (gguf_bytes(version=1), "its version is 1, and versions 2 and 3 are supported"),
    "big-endian": (gguf_bytes(version=3 << 24), "its version is 50,331,648, and versions 2 and 3 are supported"),
    "count of tensors": (gguf_bytes(num_tensors=HUGE), f"it states {HUGE:,} tensors, more than 100,000"),
    "count of metadata": (gguf_bytes(num_metadata=HUGE), f"it states {HUGE:,} metadata, more than 100,000"),
    "one tensor too many": (gguf_bytes(num_tensors=50_000), "its tensor  is empty|it has a text of"),
    "length of a name": (gguf_bytes([struct.pack("<Q", HUGE)]), f"it has a text of {HUGE:,} bytes"),
    "long text": (gguf_bytes([struct.pack("<Q", 1 << 24)]), "it ends within its header"),
    "text that is not UTF-8": (gguf_bytes([entry("a", STRING, text(b"\xff"))]), "it has text that is not UTF-8"),
    "type of a value": (gguf_bytes([entry("a", 77, b"")]), "its metadata have a value of the unknown type 77"),
    "array of numbers": (gguf_bytes([array(U32, HUGE)]), "its metadata have arrays of more than 8,000,000 values"),
    "cut array": (gguf_bytes([array(U32, 7_000_000)]), "it ends within its header"),
    "array of texts": (
        gguf_bytes([array(STRING, 7_000_000)], num_bytes=1 << 16),
        "it ends within its header|a text of",
    ),
    "many arrays": (
        gguf_bytes([array(BOOL, 5_000_000, bytes(5_000_000)).replace(b"list", b"lis%d" % i) for i in range(2)]),
        "its metadata have arrays of more than 8,000,000 values",
    ),
    "array of arrays": (gguf_bytes([array(ARRAY, 3)]), "its metadata contain an array of the unsupported type 9"),
    "metadata twice": (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "its metadata have general.architecture twice"),
    "no architecture": (gguf_bytes([number("a", 1)]), "it has no general.architecture"),
    "no tensors": (gguf_bytes(tensors=[]), "it has no tensors"),
    "alignment": (gguf_bytes([ARCHITECTURE, number("general.alignment", 0)]), "its alignment is 0, not a power of 2"),
    "dims": (gguf_bytes(tensors=[tensor(num_dims=1 << 31)]), "its tensor t has 2,147,483,648 dims"),
    "product of dims": (gguf_bytes(tensors=[tensor(dims=(1 << 40, 1 << 40))]), "its tensor t ends at byte"),
    "name of two lines": (gguf_bytes(tensors=[tensor("a\nb", dims=(0,))]), r"its tensor a\\nb is empty"),
    "empty tensor": (gguf_bytes(tensors=[tensor(dims=(0,))]), "its tensor t is empty"),
    "quantization": (gguf_bytes(tensors=[tensor(kind=4321)]), "its tensor t has the unknown quantization 4321"),
    "row": (
        gguf_bytes(tensors=[tensor(dims=(31,), kind=2)]),
        "its tensor t has rows of 31 values, not a multiple of 32",
    ),
    "offset": (gguf_bytes(tensors=[tensor(offset=HUGE)]), "its tensor t ends at byte .*, and the file has"),
    "alignment of an offset": (gguf_bytes(tensors=[tensor(offset=7)]), "its tensor t has the offset 7, which is not"),
    "overlap": (gguf_bytes(tensors=[tensor("a"), tensor("b")]), "its tensor b overlaps another one"),
    "tensor twice": (gguf_bytes(tensors=[tensor(), tensor(offset=128)], num_bytes=256), "it has a tensor twice"),
    "layers": (
        gguf_bytes([ARCHITECTURE, number("llama.block_count", 1 << 31)]),
        "its llama.block_count is 2147483648, more than its tensors allow",
    ),
    "experts": (
        gguf_bytes([ARCHITECTURE, number("llama.expert_count", 1 << 31)]),
        "its llama.expert_count is 2147483648, more than its tensors allow",
    ),
    "parts": (
        gguf_bytes([ARCHITECTURE, number("split.count", 3)]),
        "it is one of 3 parts: merge them, for example with llama-gguf-split --merge",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_with_one_sentence_in_little_memory(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = write(tmp_path, content)
    tracemalloc.start()
    with pytest.raises(ModelRefused, match=message) as refused:
        read_header(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(refused.value).startswith(f"{path} is not a usable GGUF file: ")
    assert "\n" not in str(refused.value) and most < MAX_BYTES


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    content = write_llama(tmp_path / "whole.gguf").read_bytes()
    end = max(each.end for each in read_header(tmp_path / "whole.gguf").tensors)
    rng = random.Random(1)
    for size in [*range(200), *(rng.randrange(end) for _ in range(300)), end - 1]:
        with pytest.raises(ModelRefused):
            read_header(write(tmp_path, content[:size]))


def test_damaged_headers_are_read_or_refused(tmp_path: Path) -> None:
    content = write_llama(tmp_path / "whole.gguf").read_bytes()
    begin = min(each.begin for each in read_header(tmp_path / "whole.gguf").tensors)
    rng = random.Random(2)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(4, begin)] = rng.randrange(256)
        try:
            read_header(write(tmp_path, bytes(damaged)))
        except ModelRefused:
            num_refused += 1
    assert 50 < num_refused < 300


@pytest.mark.parametrize("name", ["missing.gguf", ""])
def test_unreadable_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelRefused, match=r"cannot be read: (No such file or directory|Is a directory)"):
        read_header(tmp_path / name)
