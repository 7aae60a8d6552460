"""Records of a parcel: what they say of a context and its segments, beside token ids and pieces.

    head | for each segment, the first one first: segment, its token ids, its pieces | end

They name neither services nor objects: where it arrives all names are new.
"""

from typing import TypeVar

import msgspec

from longleaf.document_text import DocumentText
from longleaf.errors import InvalidArgument
from longleaf.fingerprint import Fingerprint
from longleaf.geometry import Rope
from longleaf.parcel.frames import FIELD

ID_BYTES = 4
IDS_PER_RECORD = 1 << 18
MAX_HEAD_BYTES = 1 << 20
MAX_SEGMENT_BYTES = 64 << 20
"""Of what is said of a segment: some hundred bytes for each piece."""
MAX_PIECE_BYTES = 1 << 30
"""Services write pieces of 64 MiB, or one block if that is more."""
MIN_SHARE = 1 / 2
"""How much of a segment's tokens a context must use for its keys to be taken, which come whole: early versions sent
segments that were used in part. It bounds all ids, too."""
MAX_TOKENS = 1 << 40
MAX_NAME = 256
"""Characters."""
Told = TypeVar("Told", "Head", "SegmentHead")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A context and the checkpoint that read it. Times in seconds since the epoch."""

    fingerprint: Fingerprint
    model: str
    """For people."""
    context: str
    """The id that it had."""
    num_tokens: int
    ends: tuple[int, ...]
    """Where its last documents ended, and where it was forked."""
    capacity: int
    """Positions that its rope was chosen for."""
    created: float
    updated: float
    display_name: str = ""
    is_pinned: bool = False
    expires: float | None = None

    def check(self) -> None:
        """Raises InvalidArgument where it contradicts itself."""
        if not 0 < self.num_tokens <= self.capacity <= MAX_TOKENS:
            raise InvalidArgument(FIELD, f"it has {self.num_tokens} tokens, and a capacity of {self.capacity}")
        if any(not 0 < end <= self.num_tokens for end in self.ends):
            raise InvalidArgument(FIELD, "it ends where it has no tokens")
        if max(map(len, (self.context, self.display_name, self.model))) > MAX_NAME:
            raise InvalidArgument(FIELD, f"a name has more than {MAX_NAME} characters")


class Part(msgspec.Struct, frozen=True):
    """A piece, whose bytes follow."""

    runs: tuple[tuple[int, int], ...]
    num_bytes: int
    digest: str
    """Hexadecimal digits of BLAKE3."""


class Keys(msgspec.Struct, frozen=True):
    """Keys and values of a whole segment."""

    form: str
    pieces: tuple[Part, ...]
    windows: Part | None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order in which they follow."""
        return self.pieces if self.windows is None else (*self.pieces, self.windows)


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of the path: it begins where those before it end."""

    num_used: int
    """Tokens of it on the path."""
    num_tokens: int
    """All of its tokens, which is more than are used only in what early versions wrote, where keys are of all."""
    rope: Rope
    keys: Keys | None
    text: DocumentText | None = None
    """Which text the tokens are, where that is known; early versions did not say."""

    def check(self, num_left: int, num_room: int) -> None:
        """Raises InvalidArgument where it contradicts itself, has more than `num_left` tokens on the path, or more
        than `num_room` in all."""
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


def encode(told: Head | SegmentHead) -> bytes:
    return msgspec.msgpack.encode(told, order="deterministic")


def decode(content: bytes | bytearray, kind: type[Told]) -> Told:
    """Raises InvalidArgument where the content is none."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(FIELD, f"it makes no sense: {error}") from error
