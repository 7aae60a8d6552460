"""Manifest of a segment: the objects with its keys and values, and its token ids.

It is written last. Pieces that no manifest references are ignored.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Self

import msgspec

from longleaf.errors import DataLoss, InvalidArgument
from longleaf.little_endian import pack
from longleaf.positions import Rope
from longleaf.runs import Range
from longleaf.storage.envelope import unwrap, wrap
from longleaf.storage.names import Attempt, attempt_of_piece, is_id, segment_name
from longleaf.storage.segment_record import SegmentRecord

KIND = b"manifest"
VERSION = 1
ID_BYTES = 4


class PieceRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object with the keys and values of some positions."""

    name: str = ""
    """Empty in an archive, whose pieces follow their description."""
    runs: tuple[Range, ...]
    """Positions [start, end), increasing; whole blocks from the segment's start, except the last one. Empty in an
    archive with another form of keys than the expected one."""
    num_bytes: int
    digest: str
    """BLAKE3 in hexadecimal."""


class SegmentManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A segment on storage."""

    service: str
    """Id of the service that wrote it."""
    fingerprint: str
    """Fingerprint of the checkpoint that computed it."""
    form: str
    """Pool format required for restoring the pieces, as defined by the ranks; opaque here and only compared."""
    segment: str
    """Unique over all services."""
    parent: str | None
    """The segment whose tokens precede `start`; None at the beginning of a context."""
    start: int
    num_tokens: int
    rope: Rope
    pieces: tuple[PieceRef, ...]
    """In any order; together they contain each position once."""
    windows: PieceRef | None
    """Keys of sliding-window layers, if these are replicated on every rank: some positions before the segment's end."""
    token_ids: bytes
    """4 bytes each, little endian."""

    @classmethod
    def of(
        cls,
        attempt: Attempt,
        segment: SegmentRecord,
        fingerprint: str,
        form: str,
        pieces: Iterable[PieceRef],
        windows: PieceRef | None,
    ) -> Self:
        """The manifest of a segment of this service, written by an attempt."""
        return cls(
            service=attempt.service,
            fingerprint=fingerprint,
            form=form,
            segment=attempt.segment,
            parent=None if segment.parent is None else segment_name(attempt.service, segment.parent),
            start=segment.start,
            num_tokens=len(segment.token_ids),
            rope=segment.rope,
            pieces=tuple(pieces),
            windows=windows,
            token_ids=pack(segment.token_ids).tobytes(),
        )

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def objects(self) -> Iterator[str]:
        """Names of all referenced objects."""
        return (piece.name for piece in self.all_pieces)

    def check(self) -> None:
        """Raises InvalidArgument, naming the field, if it is inconsistent, or if a position is missing from its pieces
        or occurs twice."""
        for field, value in (("service", self.service), ("segment", self.segment)):
            if not is_id(value):
                raise InvalidArgument(field, f"{value[:100]!r} must consist of a-z 0-9 -")
        if self.start < 0 or self.num_tokens <= 0 or (self.parent is None) != (self.start == 0):
            raise InvalidArgument("start", f"{self.num_tokens} tokens from {self.start} on, after {self.parent}")
        if len(self.token_ids) != ID_BYTES * self.num_tokens:
            raise InvalidArgument("token_ids", f"{len(self.token_ids)} bytes for {self.num_tokens} tokens")
        self._check_runs()
        for piece in self.all_pieces:
            attempt = attempt_of_piece(piece.name)
            if attempt is None or (attempt.service, attempt.segment) != (self.service, self.segment):
                raise InvalidArgument("pieces", f"{piece.name[:200]!r} is not an object of {self.segment}")
        if len(set(self.objects)) < len([*self.objects]):
            raise InvalidArgument("pieces", "an object is named twice")

    def check_blocks(self, block_size: int) -> None:
        """Raises InvalidArgument unless each run of a piece starts at a block of the segment, and ends at a block or at
        the segment's end, because partial blocks would take additional blocks of the pool. Blocks of windows start at
        the start of their run."""
        for start, end in (run for piece in self.pieces for run in piece.runs):
            if (start - self.start) % block_size or ((end - self.start) % block_size and end != self.end):
                message = (
                    f"positions {start} to {end} of a segment from {self.start} on are not whole blocks of {block_size}"
                )
                raise InvalidArgument("pieces", message)

    @property
    def all_pieces(self) -> tuple[PieceRef, ...]:
        """The pieces, and then that of the windows."""
        return self.pieces if self.windows is None else (*self.pieces, self.windows)

    def _check_runs(self) -> None:
        for piece in self.pieces:
            _check_rising(piece, "pieces")
        # sorted runs, each of which starts at the end of the previous one
        runs = sorted(run for piece in self.pieces for run in piece.runs)
        bounds = [self.start, *(bound for run in runs for bound in run), self.end]
        if any(end != start for end, start in zip(bounds[::2], bounds[1::2], strict=True)):
            raise InvalidArgument("pieces", f"they do not hold each position from {self.start} to {self.end} once")
        if self.windows is not None:
            _check_rising(self.windows, "windows")
            if self.windows.runs[0][0] < self.start or self.windows.runs[-1][1] > self.end:
                raise InvalidArgument("windows", f"they are not of positions from {self.start} to {self.end}")


def _check_rising(piece: PieceRef, field: str) -> None:
    bounds: Iterable[int] = [bound for run in piece.runs for bound in run]
    if not bounds or any(start >= end for start, end in piece.runs) or any(a > b for a, b in pairwise(bounds)):
        raise InvalidArgument(field, f"runs of {piece.name[:200]!r} are empty, or not in rising order")


def encode_manifest(manifest: SegmentManifest) -> bytes:
    """Raises InvalidArgument like `check`."""
    manifest.check()
    return wrap(KIND, VERSION, msgspec.msgpack.encode(manifest))


def decode_manifest(data: bytes, name: str) -> SegmentManifest:
    """The manifest stored as `name`. Raises DataLoss if it is damaged, inconsistent, or of a later version."""
    content = unwrap(data, KIND, VERSION, name)
    try:
        manifest = msgspec.msgpack.decode(content, type=SegmentManifest)
        manifest.check()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument) as error:
        raise DataLoss(name, f"it is invalid: {error}") from error
    return manifest
