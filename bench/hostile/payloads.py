"""Hostile requests: bytes that are cheap to make and expensive to parse.

Large parts are encoded by hand and appended to the rest of the message: protobuf parsers merge the two.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from longleaf.context_archive.frames import PREAMBLE, Frame, Kind
from longleaf.context_archive.records import ContextHead, encode
from longleaf.fingerprint import Fingerprint
from longleaf.positions import Rope
from longleaf.v1 import context_pb2, context_service_pb2, generation_pb2, generation_service_pb2

LARGEST = (64 << 20) - 4096
"""Bytes of a request, slightly below an earlier limit of the service."""
TAKEN = (4 << 20) - 4096
"""Bytes of a request, slightly below the limit of the service."""
PIECE = (1 << 20) - 4096
"""The same of a piece of a document."""
TOKEN = b"A"
"""A token id that every vocabulary has; it takes one byte."""
SHORT_STRING = b"\x01x"
"""Length and content."""
CONTEXT = "hostile"
RECORD_BYTES = 60 << 20
"""Of a record about one segment."""
NUM_ENDS = 900_000
BIAS_BYTES = 12
FIRST_BIAS = 1 << 21
"""From here to 2^28 ids take four bytes."""

_PROMPT, _TEXT, _SAMPLING, _STOP, _BIAS = 3, 2, 5, 6, 12
_DATA_IDS, _PATHS, _MASK = 3, 1, 2


def generate(sampling: generation_pb2.SamplingParams | None = None, num_samples: int = 1) -> bytes:
    """A generation after a short prompt."""
    prompt = generation_pb2.TokenIds(ids=TOKEN * 8)
    request = generation_service_pb2.GenerateRequest(token_ids=prompt, sampling=sampling, sample_count=num_samples)
    return request.SerializeToString()


def conversation(number: int) -> bytes:
    """A generation after a conversation whose turns are no other number's."""
    roles = [generation_pb2.ROLE_USER, generation_pb2.ROLE_ASSISTANT, generation_pb2.ROLE_SYSTEM]
    turns = [roles[number // 3**place % 3] for place in range(16)] + [generation_pb2.ROLE_USER]
    messages = [generation_pb2.Message(role=role, parts=[generation_pb2.Part(text="x")]) for role in turns]
    requested = generation_pb2.Conversation(messages=messages)
    return generation_service_pb2.GenerateRequest(conversation=requested).SerializeToString()


def import_runs() -> list[bytes]:
    """An import whose one segment has a piece of millions of runs."""
    runs = msgspec.msgpack.encode([0, 1]) * (RECORD_BYTES // 3)
    head = msgspec.msgpack.encode({"num_used": 20, "num_tokens": 20, "rope": Rope()})
    piece = (
        b"\x83"
        + b"".join(map(msgspec.msgpack.encode, ["num_bytes", 9, "digest", "0" * 64, "runs"]))
        + b"\xdd"
        + (RECORD_BYTES // 3).to_bytes(4, "big")
        + runs
    )
    keys = b"\x83" + b"".join(map(msgspec.msgpack.encode, ["form", "", "windows", None, "pieces"])) + b"\x91" + piece
    record = b"\x84" + head[1:] + msgspec.msgpack.encode("keys") + keys
    return _import(_record("head", _head(20, (20,))) + _record("segment", record))


def import_ends() -> list[bytes]:
    """An import of a context that was made in very many pieces."""
    return _import(_record("head", _head(NUM_ENDS, range(1, NUM_ENDS + 1))))


def _head(num_tokens: int, ends: Iterable[int]) -> bytes:
    head = ContextHead(
        context=CONTEXT,
        model="",
        fingerprint=Fingerprint("0" * 64, {}),
        num_tokens=num_tokens,
        ends=tuple(ends),
        capacity=num_tokens,
        created=1.0,
        updated=1.0,
    )
    return encode(head)


def _record(kind: Kind, content: bytes) -> bytes:
    return Frame.from_content(kind, content).encode() + content


def _import(records: bytes) -> list[bytes]:
    """The requests of an import."""
    content = PREAMBLE + records
    config = context_service_pb2.ImportConfig(name=f"contexts/{CONTEXT}")
    requests = [context_service_pb2.ImportContextRequest(config=config)]
    for offset in range(0, len(content), PIECE):
        piece = context_service_pb2.ArchiveChunk(offset=offset, data=content[offset : offset + PIECE])
        requests.append(context_service_pb2.ImportContextRequest(chunk=piece))
    return [request.SerializeToString() for request in requests]


def ids(num_bytes: int) -> bytes:
    """A TokenIds of so many ids."""
    return field(1, TOKEN * num_bytes)


def generate_ids(num_bytes: int) -> bytes:
    return field(_PROMPT, ids(num_bytes))


def generate_text(num_bytes: int) -> bytes:
    words = b"the quick brown fox jumps over the lazy dog "
    return field(_TEXT, (words * (num_bytes // len(words) + 1))[:num_bytes])


def generate_stops(num_bytes: int) -> bytes:
    """Stop strings of one character."""
    return generate() + field(_SAMPLING, _strings(_STOP, num_bytes))


def generate_biases(num_bytes: int) -> bytes:
    """Biases of ids that differ: message 12 of (key: 4 bytes, value: float)."""
    keys = np.arange(num_bytes // BIAS_BYTES, dtype=np.uint32) + FIRST_BIAS
    entries = np.zeros((len(keys), BIAS_BYTES), np.uint8)
    entries[:, :3] = (_BIAS << 3 | 2, BIAS_BYTES - 2, 1 << 3)
    for place in range(4):
        entries[:, 3 + place] = (keys >> 7 * place & 0x7F) | (0x80 if place < 3 else 0)
    entries[:, 7] = 2 << 3 | 5
    return generate() + field(_SAMPLING, entries.tobytes())


def detokenize(num_bytes: int) -> bytes:
    return field(1, ids(num_bytes))


def update_mask(num_bytes: int) -> bytes:
    """A change of many fields that do not exist."""
    named = context_service_pb2.UpdateContextRequest(context=context_pb2.Context(name="contexts/nobodys"))
    return named.SerializeToString() + field(_MASK, _strings(_PATHS, num_bytes))


def ingest_config(name: str) -> bytes:
    config = context_service_pb2.IngestConfig(name=f"contexts/{name}")
    return context_service_pb2.IngestContextRequest(config=config).SerializeToString()


def ingest_ids(num_bytes: int) -> bytes:
    return field(_DATA_IDS, ids(num_bytes))


def _strings(number: int, num_bytes: int) -> bytes:
    one = _varint(number << 3 | 2) + SHORT_STRING
    return one * (num_bytes // len(one))


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, a string or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
