"""Records of an archive: descriptions of a context and its segments, in addition to token ids and pieces.

    head | for each segment, in order: segment, its token ids, its pieces | end

The records contain no names of services or objects. The importing service assigns new names.
"""

from typing import TypeVar

import msgspec

from longleaf.context_archive.frames import FIELD
from longleaf.document_text import OFFSET_BYTES, DocumentText, count_starts
from longleaf.errors import InvalidArgument
from longleaf.fingerprint import Fingerprint
from longleaf.positions import Rope
from longleaf.runs import Range
from longleaf.storage.context_record import MAX_ENDS, ContextMetadata, sound_ends
from longleaf.storage.manifest import PieceRef

ID_BYTES = 4
IDS_PER_RECORD = 1 << 18
MAX_HEAD_BYTES = 1 << 20
MIN_KEYS_BYTES = 256 << 10
KEYS_BYTES = 2
"""Maximum bytes per token of the description of keys, in addition to MIN_KEYS_BYTES. A piece takes about a hundred
bytes, and a run eleven."""
MAX_FILES_BYTES = 4 << 20
"""Limit of the files of a text: as many as an ingest request may have."""
MAX_FINGERPRINT_FILES = 10_000
SEGMENT_BYTES, PIECE_BYTES, RUN_BYTES, FILE_BYTES = 2048, 640, 160, 160
"""Approximate memory of each description, without names."""
MAX_PIECE_BYTES = 1 << 30
"""Maximum size of an imported piece. Services write pieces of 64 MiB, or of one block if that is larger."""
MIN_SHARE = 1 / 2
"""Minimum share of a segment's tokens that a context must use for its keys to be accepted. Keys are sent for whole
segments, and early versions sent partly used ones. It also bounds the number of ids."""
MAX_TOKENS = 1 << 40
MAX_NAME = 256
"""Maximum length in characters."""
MAX_WINDOW_RUNS = 8
"""Maximum number of window runs in addition to one per block, because these runs may start anywhere."""
RecordT = TypeVar("RecordT")


class ContextHead(ContextMetadata, frozen=True):
    """A context and the checkpoint that computed it."""

    fingerprint: Fingerprint
    model: str
    """Model name, for display."""
    context: str
    """The original id."""

    def check(self) -> None:
        """Raises InvalidArgument if it is inconsistent."""
        if not 0 < self.num_tokens <= self.capacity <= MAX_TOKENS:
            raise InvalidArgument(FIELD, f"it has {self.num_tokens} tokens, and a capacity of {self.capacity}")
        if sound_ends(self.ends, self.num_tokens) is None:
            message = f"its ends must increase up to {self.num_tokens:,}, with at most {MAX_ENDS} entries"
            raise InvalidArgument(FIELD, message)
        if len(self.fingerprint.files) > MAX_FINGERPRINT_FILES:
            raise InvalidArgument(FIELD, f"its checkpoint has more than {MAX_FINGERPRINT_FILES:,} files")
        if max(map(len, (self.context, self.display_name, self.model))) > MAX_NAME:
            raise InvalidArgument(FIELD, f"a name has more than {MAX_NAME} characters")


class KvSection(msgspec.Struct, frozen=True):
    """Keys and values of a whole segment, whose pieces have no names and follow."""

    form: str
    pieces: tuple[PieceRef, ...]
    windows: PieceRef | None

    @property
    def parts(self) -> tuple[PieceRef, ...]:
        """All pieces, in the order of their contents."""
        return self.pieces if self.windows is None else (*self.pieces, self.windows)


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of the path, which starts at the end of the previous ones."""

    num_used: int
    """Number of its tokens on the path."""
    num_tokens: int
    """Number of all its tokens. Exceeds `num_used` only in archives of early versions, which contain keys of the whole
    segment."""
    rope: Rope
    keys: KvSection | None
    text: DocumentText | None = None
    """Mapping of the tokens to text, if known; absent in early versions."""

    def check(self, num_left: int, num_room: int) -> None:
        """Raises InvalidArgument if it is inconsistent, has more than `num_left` tokens on the path, or more than
        `num_room` in total."""
        most = self.num_used if self.keys is None else int(self.num_used / MIN_SHARE)
        if not (0 < self.num_used <= num_left and self.num_used <= self.num_tokens <= min(most, num_room)):
            raise InvalidArgument(FIELD, f"a segment has {self.num_tokens} tokens, and {self.num_used} are used")
        if self.text is not None:
            self.text.check(self.num_tokens, FIELD)
        for part in () if self.keys is None else self.keys.parts:
            if not 0 < part.num_bytes <= MAX_PIECE_BYTES:
                raise InvalidArgument(FIELD, f"a piece of {part.num_bytes} bytes is empty or too large")
            if len(part.digest) != 64 or set(part.digest) - set("0123456789abcdef"):
                raise InvalidArgument(FIELD, "a piece has no digest")

    @property
    def num_buffered_bytes(self) -> int:
        """Approximate memory of the description in bytes."""
        parts = () if self.keys is None else self.keys.parts
        resident = SEGMENT_BYTES + PIECE_BYTES * len(parts) + RUN_BYTES * sum(len(part.runs) for part in parts)
        if self.text is not None:
            resident += len(self.text.starts) + sum(FILE_BYTES + len(file.name) for file in self.text.files)
        return resident


class _RawPart(msgspec.Struct, frozen=True):
    """A PieceRef with undecoded runs. An undecoded run takes three bytes, a decoded one fifty times as many."""

    runs: msgspec.Raw
    num_bytes: int
    digest: str


class _RawKeys(msgspec.Struct, frozen=True):
    form: str
    pieces: tuple[_RawPart, ...]
    windows: _RawPart | None


class _RawSegmentHead(msgspec.Struct, frozen=True, kw_only=True):
    """A SegmentHead with undecoded variable-length fields."""

    num_used: int
    num_tokens: int
    rope: Rope
    keys: msgspec.Raw
    text: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))


def _max_keys_bytes(num_tokens: int) -> int:
    return MIN_KEYS_BYTES + KEYS_BYTES * num_tokens


def _max_text_bytes(num_tokens: int) -> int:
    return MAX_FILES_BYTES + OFFSET_BYTES * count_starts(num_tokens)


def max_segment_bytes(num_left: int) -> int:
    """Maximum size of a segment description, on a path with this number of tokens left."""
    num_tokens = int(num_left / MIN_SHARE)
    return MIN_KEYS_BYTES + _max_keys_bytes(num_tokens) + _max_text_bytes(num_tokens)


def decode_segment(content: bytes | bytearray, num_left: int, form: str | None, block_size: int) -> SegmentHead:
    """Decodes a segment description, on a path with this number of tokens left. Runs are decoded only for keys of this
    form, and at most one per block of the segment; oversized fields are not decoded, because they would take many times
    their size in memory. Raises InvalidArgument."""
    raw = decode(content, _RawSegmentHead)
    num_tokens = max(0, min(raw.num_tokens, int(num_left / MIN_SHARE)))
    limits = {"keys": (raw.keys, _max_keys_bytes(num_tokens)), "text": (raw.text, _max_text_bytes(num_tokens))}
    for name, (part, most) in limits.items():
        if (num_bytes := memoryview(part).nbytes) > most:
            message = f"its {name} has {num_bytes:,} bytes; the limit for {num_tokens:,} tokens is {most:,}"
            raise InvalidArgument(FIELD, message)
    num_blocks = -(-num_tokens // block_size)
    return SegmentHead(
        num_used=raw.num_used,
        num_tokens=raw.num_tokens,
        rope=raw.rope,
        keys=None if _is_nil(raw.keys) else _decode_keys(decode(raw.keys, _RawKeys), form, num_blocks),
        text=None if _is_nil(raw.text) else decode(raw.text, DocumentText),
    )


def _decode_keys(raw: _RawKeys, form: str | None, num_blocks: int) -> KvSection:
    if len(raw.pieces) > num_blocks and raw.form == form:
        raise InvalidArgument(FIELD, f"a segment has {len(raw.pieces):,} pieces for {num_blocks:,} blocks")
    windows = None
    if raw.form != form:
        pieces = [PieceRef(runs=(), num_bytes=part.num_bytes, digest=part.digest) for part in raw.pieces]
        windows = raw.windows and PieceRef(runs=(), num_bytes=raw.windows.num_bytes, digest=raw.windows.digest)
        return KvSection(raw.form, tuple(pieces), windows)
    num_runs = sum(_count(part.runs) for part in raw.pieces)
    num_windows = 0 if raw.windows is None else _count(raw.windows.runs)
    if num_runs > num_blocks or num_windows > num_blocks + MAX_WINDOW_RUNS:
        message = f"a segment of {num_blocks:,} blocks has {num_runs:,} runs, and {num_windows:,} of windows"
        raise InvalidArgument(FIELD, message)
    windows = None if raw.windows is None else _decode_part(raw.windows)
    return KvSection(raw.form, tuple(map(_decode_part, raw.pieces)), windows)


def _decode_part(raw: _RawPart) -> PieceRef:
    return PieceRef(runs=decode(raw.runs, tuple[Range, ...]), num_bytes=raw.num_bytes, digest=raw.digest)


def _is_nil(raw: msgspec.Raw) -> bool:
    return memoryview(raw)[0] == 0xC0


def _count(runs: msgspec.Raw) -> int:
    """Number of elements of a MessagePack array, from its first bytes. Raises InvalidArgument for other types."""
    data = memoryview(runs)
    if data[0] & 0xF0 == 0x90:
        return data[0] & 0x0F
    if data[0] in (0xDC, 0xDD):
        return int.from_bytes(data[1 : 3 if data[0] == 0xDC else 5], "big")
    raise InvalidArgument(FIELD, "it is invalid: runs is not an array")


def encode(record: ContextHead | SegmentHead) -> bytes:
    return msgspec.msgpack.encode(record, order="deterministic")


def decode(content: bytes | bytearray | msgspec.Raw, kind: type[RecordT]) -> RecordT:
    """Raises InvalidArgument for invalid content."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(FIELD, f"it is invalid: {error}") from error
