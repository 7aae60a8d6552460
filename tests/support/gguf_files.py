"""Small GGUF files: a quantized Llama with random weights, and headers of any content."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.service import byte_tokenizer

NUM_LAYERS, DIM, HEADS, KV_HEADS, FEED_FORWARD = 2, 64, 4, 2, 128
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)
STRING, ARRAY, U32, U64, BOOL = 8, 9, 4, 10, 7


def write_llama(path: Path, seed: int = 0, **changed: int) -> Path:
    """Writes a Llama with matrices in Q8_0 and Q4_0. `changed` replaces numbers of its metadata; `__` is a dot."""
    rng = np.random.default_rng(seed)
    tokenizer = byte_tokenizer([("a", "b"), ("c", "d")])
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "context_length": 256,
        "embedding_length": DIM,
        "block_count": NUM_LAYERS,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": DIM // HEADS,
        "vocab_size": len(vocabulary),
    }
    for name, value in (numbers | {name.replace("__", "."): value for name, value in changed.items()}).items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_name("tiny")
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    kinds = [gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token, _ in vocabulary]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "c d"])
    ids = tokenizer.get_vocab()
    writer.add_bos_token_id(ids["<|begin|>"])
    writer.add_eos_token_id(ids["<|end|>"])
    writer.add_chat_template(TEMPLATE)
    key_dim = DIM // HEADS * KV_HEADS
    q8, q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0

    def add(name: str, shape: tuple[int, ...], kind: Any = None) -> None:
        values = rng.normal(0, 0.2, shape).astype(np.float32)
        if kind is None:
            writer.add_tensor(name, values + 1)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (len(vocabulary), DIM), q8)
    add("output_norm.weight", (DIM,))
    add("output.weight", (len(vocabulary), DIM), q8)
    for layer in range(NUM_LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (DIM,))
        add(f"blk.{layer}.ffn_norm.weight", (DIM,))
        for name, rows in (("q", DIM), ("k", key_dim), ("v", key_dim), ("output", DIM)):
            add(f"blk.{layer}.attn_{name}.weight", (rows, DIM), q4)
        for name, shape in (("gate", (FEED_FORWARD, DIM)), ("up", (FEED_FORWARD, DIM)), ("down", (DIM, FEED_FORWARD))):
            add(f"blk.{layer}.ffn_{name}.weight", shape, q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    """A string with its length."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def entry(name: str, kind: int, value: bytes) -> bytes:
    """An entry of the metadata."""
    return text(name) + struct.pack("<I", kind) + value


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


def tensor(name: str = "t", dims: Sequence[int] = (32,), kind: int = 0, offset: int = 0, num_dims: int = -1) -> bytes:
    """A row of the tensor table."""
    count = len(dims) if num_dims < 0 else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def gguf_bytes(
    metadata: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (tensor(),),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_metadata: int | None = None,
    num_tensors: int | None = None,
    num_bytes: int = 128,
) -> bytes:
    """A file with this header and `num_bytes` of tensors. The counts may contradict the entries."""
    counts = [
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_metadata is None else num_metadata,
    ]
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join([*metadata, *tensors])
    return header + bytes(-len(header) % 32) + bytes(range(num_bytes % 256)) + bytes(num_bytes - num_bytes % 256)
