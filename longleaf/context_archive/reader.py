"""Incremental archive reader: accepts bytes in arbitrary pieces, and returns each record once it is complete and
verified."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from blake3 import blake3

from longleaf.context_archive.frames import DIGEST_BYTES, FIELD, FRAME_BYTES, PREAMBLE, Frame, Kind, check_preamble
from longleaf.context_archive.records import (
    ID_BYTES,
    IDS_PER_RECORD,
    MAX_HEAD_BYTES,
    ContextHead,
    SegmentHead,
    decode,
    decode_segment,
    max_segment_bytes,
)
from longleaf.errors import InvalidArgument
from longleaf.little_endian import unpack
from longleaf.storage.manifest import PieceRef


class IdsSection(NamedTuple):
    """The next token ids of a segment."""

    token_ids: "array[int]"


Section = ContextHead | SegmentHead | IdsSection | bytearray
"""A head; a segment; a part of its token ids; the bytes of its next piece. The end record follows the last of them."""


class ArchiveReader:
    """Reads the bytes of one archive. It buffers one record at a time.

    All data is verified before use: a record is returned once its digest matches, and lengths are checked against
    earlier records, so memory use is bounded for any input. An archive is complete only with its end record.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Total bytes read."""
        self.is_complete = False
        self._error: InvalidArgument | None = None
        self._all = blake3(PREAMBLE)
        self._content = bytearray()
        """The incomplete current part: PREAMBLE, a frame, or the content of a record."""
        self._content_digest = blake3()
        self._frame: Frame | None = None
        self._has_begun = False
        self._head: ContextHead | None = None
        self._num_ids_left = 0
        """Remaining ids of the current segment."""
        self._num_tokens_left = 0
        """Tokens of the path after the current segment."""
        self._parts: Iterator[PieceRef] = iter(())
        self._part: PieceRef | None = None
        self._form: str | None = None
        self._block_size = 1

    def expect(self, form: str | None, block_size: int) -> None:
        """Accepts keys of this form, whose runs have blocks of this size; the runs of other forms are omitted."""
        self._form, self._block_size = form, block_size

    @property
    def num_buffered_bytes(self) -> int:
        """Buffered bytes of the current record."""
        return len(self._content)

    @property
    def is_description(self) -> bool:
        """Whether the current record is the head or a segment description, which may take long to decode."""
        return self._frame is not None and self._frame.kind in ("head", "segment")

    def feed(self, data: memoryview) -> tuple[int, Section | None]:
        """Consumes bytes up to the end of the current part; returns their number and the decoded record, if any. Raises
        InvalidArgument for invalid data, and on every later call."""
        if self._error is not None:
            raise self._error
        if self.is_complete:
            raise self._fail("it has extra bytes after its end")
        count = min(len(data), self._num_wanted - len(self._content))
        self._content += data[:count]
        if self._frame is not None:
            self._content_digest.update(data[:count])
        self.num_bytes += count
        record = self._complete() if len(self._content) == self._num_wanted else None
        return count, record

    def check_complete(self) -> None:
        """Raises InvalidArgument if the end record is missing."""
        if not self.is_complete:
            raise self._fail("it is truncated: its end is missing")

    @property
    def _num_wanted(self) -> int:
        if not self._has_begun:
            return len(PREAMBLE)
        return FRAME_BYTES if self._frame is None else self._frame.num_bytes

    def _complete(self) -> Section | None:
        content, self._content = self._content, bytearray()
        try:
            if not self._has_begun:
                check_preamble(bytes(content))
                self._has_begun = True
            elif self._frame is None:
                self._begin(bytes(content))
            else:
                return self._record(content)
        except InvalidArgument as error:
            raise self._fail(error.description) from None
        return None

    def _begin(self, data: bytes) -> None:
        """Checks that the frame may follow."""
        frame, (kind, shortest, longest) = Frame.decode(data), self._next()
        if frame.kind != kind:
            raise InvalidArgument(FIELD, f"found {frame.kind!r} where {kind!r} is expected")
        if not shortest <= frame.num_bytes <= longest:
            raise InvalidArgument(
                FIELD, f"{kind!r} has {frame.num_bytes:,} bytes; allowed are {shortest:,} to {longest:,}"
            )
        if self._part is not None and self._num_ids_left == 0 and frame.digest != self._part.digest:
            raise InvalidArgument(FIELD, "a piece does not match its digest")
        if kind != "end":
            self._all.update(data)
        self._frame, self._content_digest = frame, blake3()

    def _next(self) -> tuple[Kind, int, int]:
        """The required kind of the next record, and its minimum and maximum size."""
        if self._head is None:
            return "head", 1, MAX_HEAD_BYTES
        if self._num_ids_left:
            num_bytes = ID_BYTES * min(self._num_ids_left, IDS_PER_RECORD)
            return "ids", num_bytes, num_bytes
        if self._part is not None:
            return "piece", self._part.num_bytes, self._part.num_bytes
        if self._num_tokens_left:
            return "segment", 1, max_segment_bytes(self._num_tokens_left)
        return "end", DIGEST_BYTES, DIGEST_BYTES

    def _record(self, content: bytearray) -> Section | None:
        assert self._frame is not None
        frame, self._frame = self._frame, None
        if self._content_digest.hexdigest() != frame.digest:
            raise InvalidArgument(FIELD, f"the content of {frame.kind!r} is damaged")
        match frame.kind:
            case "head":
                return self._take_head(decode(content, ContextHead))
            case "segment":
                segment = decode_segment(content, self._num_tokens_left, self._form, self._block_size)
                return self._take_segment(segment)
            case "ids":
                self._num_ids_left -= len(content) // ID_BYTES
                return IdsSection(unpack("I", content))
            case "piece":
                self._part = next(self._parts, None)
                return content
            case _:
                return self._end(content)

    def _take_head(self, head: ContextHead) -> ContextHead:
        head.check()
        self._head, self._num_tokens_left = head, head.num_tokens
        return head

    def _take_segment(self, segment: SegmentHead) -> SegmentHead:
        assert self._head is not None
        start = self._head.num_tokens - self._num_tokens_left
        segment.check(self._num_tokens_left, self._head.capacity - start)
        self._num_tokens_left -= segment.num_used
        self._num_ids_left = segment.num_tokens
        self._parts = iter(segment.keys.parts if segment.keys is not None else ())
        self._part = next(self._parts, None)
        return segment

    def _end(self, content: bytearray) -> None:
        if bytes(content) != self._all.digest():
            raise InvalidArgument(FIELD, "its end belongs to another archive")
        self.is_complete = True

    def _fail(self, message: str) -> InvalidArgument:
        self._error = InvalidArgument(FIELD, f"{message} (after {self.num_bytes:,} bytes)")
        return self._error
