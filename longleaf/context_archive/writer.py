"""Archive writer: the layout is computed before any piece is read, so sending can start at any offset."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from longleaf.context_archive.frames import PREAMBLE, Frame
from longleaf.context_archive.records import (
    ID_BYTES,
    IDS_PER_RECORD,
    ContextHead,
    KvSection,
    SegmentHead,
    encode,
)
from longleaf.little_endian import pack
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.segment_record import SegmentRecord, with_ends

Content = memoryview | PieceRef
"""Bytes, or the storage object that contains them."""


class ByteRange(NamedTuple):
    """Consecutive bytes of an archive."""

    start: int
    """Offset of the first byte."""
    num_bytes: int
    content: Content


class ArchiveWriter:
    """The bytes of a context with this head and path; deterministic for the same arguments."""

    def __init__(
        self, head: ContextHead, path: Sequence[SegmentRecord], manifests: Mapping[int, SegmentManifest]
    ) -> None:
        """`manifests` maps the ids of stored segments. Keys are included only for completely used segments: the rest of
        a segment may belong to contexts of others, and pieces are not split."""
        self._stretches: list[ByteRange] = []
        self._num_bytes = 0
        self._digest = blake3(PREAMBLE)
        self._add(memoryview(PREAMBLE))
        self._add_record(Frame.from_content("head", content := encode(head)), memoryview(content))
        for segment, end in with_ends(path, head.num_tokens):
            self._add_segment(segment, end - segment.start, manifests.get(segment.id))
        self.digest = self._digest.hexdigest()
        """BLAKE3 in hexadecimal, of PREAMBLE and all frames except the last; the frames contain the digests of the
        contents."""
        self._add_record(Frame.from_content("end", content := bytes.fromhex(self.digest)), memoryview(content))

    @property
    def num_bytes(self) -> int:
        """Total size."""
        return self._num_bytes

    def stretches(self, offset: int) -> Iterator[tuple[Content, int]]:
        """The contents from `offset` on, and the number of bytes to skip in the first one."""
        for start, num_bytes, content in self._stretches:
            if start + num_bytes > offset:
                yield content, max(0, offset - start)

    def _add_segment(self, segment: SegmentRecord, num_used: int, manifest: SegmentManifest | None) -> None:
        text = segment.text
        if num_used < len(segment.token_ids):
            manifest, text = None, text and text.cut(num_used)
        keys = None if manifest is None else keys_of(manifest)
        head = encode(SegmentHead(num_used=num_used, num_tokens=num_used, rope=segment.rope, keys=keys, text=text))
        self._add_record(Frame.from_content("segment", head), memoryview(head))
        packed = pack(segment.token_ids)[: ID_BYTES * num_used]
        for first in range(0, len(packed), ID_BYTES * IDS_PER_RECORD):
            ids = packed[first : first + ID_BYTES * IDS_PER_RECORD]
            self._add_record(Frame.from_content("ids", ids), ids)
        if manifest is not None:
            for piece in manifest.all_pieces:
                self._add_record(Frame("piece", piece.num_bytes, piece.digest), piece)

    def _add_record(self, frame: Frame, content: Content) -> None:
        encoded = frame.encode()
        self._digest.update(encoded)
        self._add(memoryview(encoded))
        self._add(content)

    def _add(self, content: Content) -> None:
        num_bytes = content.num_bytes if isinstance(content, PieceRef) else content.nbytes
        self._stretches.append(ByteRange(self._num_bytes, num_bytes, content))
        self._num_bytes += num_bytes


def keys_of(manifest: SegmentManifest) -> KvSection:
    """Description of the keys of a segment."""
    pieces = tuple(replace(piece, name="") for piece in manifest.pieces)
    return KvSection(manifest.form, pieces, manifest.windows and replace(manifest.windows, name=""))


assert array("I").itemsize == ID_BYTES
