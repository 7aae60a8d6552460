"""The manifest of a segment: which objects hold its keys and values, and which tokens they are of.

It is written last. Pieces that no manifest names are nothing, however whole they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from longleaf.errors import DataLoss, InvalidArgument
from longleaf.positions import Rope
from longleaf.storage.envelope import seal, unseal
from longleaf.storage.names import attempt_of_piece, is_id

KIND = b"manifest"
VERSION = 1
ID_BYTES = 4


class PieceRef(msgspec.Struct, frozen=True):
    """An object with the keys and values of some positions."""

    name: str
    runs: tuple[tuple[int, int], ...]
    """Positions [start, end), rising; whole blocks from the segment's start, but for the last one."""
    num_bytes: int
    digest: str
    """Hexadecimal digits of BLAKE3."""


class SegmentManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as it lies on storage."""

    service: str
    """Id of the service that keeps it."""
    fingerprint: str
    """Of the checkpoint that read it."""
    form: str
    """What a pool of slots must be like to take the pieces in, as the ranks tell it; here it is compared at most."""
    segment: str
    """No other one of any service has this name."""
    parent: str | None
    """The segment whose tokens come before `start`; None at the beginning of a context."""
    start: int
    num_tokens: int
    rope: Rope
    pieces: tuple[PieceRef, ...]
    """In any order; together they hold each position once."""
    windows: PieceRef | None
    """What is held of windowed layers, where every rank holds it: some positions of the segment before its end."""
    token_ids: bytes
    """4 bytes each, little endian."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def objects(self) -> Iterator[str]:
        """Names of all objects that it names."""
        return (piece.name for piece in self._all_pieces())

    def check(self) -> None:
        """Raises InvalidArgument, naming the field, where it contradicts itself, or its pieces hold a position twice or
        not at all."""
        for field, value in (("service", self.service), ("segment", self.segment)):
            if not is_id(value):
                raise InvalidArgument(field, f"{value[:100]!r} is not made of a-z 0-9 -")
        if self.start < 0 or self.num_tokens <= 0 or (self.parent is None) != (self.start == 0):
            raise InvalidArgument("start", f"{self.num_tokens} tokens from {self.start} on, after {self.parent}")
        if len(self.token_ids) != ID_BYTES * self.num_tokens:
            raise InvalidArgument("token_ids", f"{len(self.token_ids)} bytes for {self.num_tokens} tokens")
        self._check_runs()
        for piece in self._all_pieces():
            attempt = attempt_of_piece(piece.name)
            if attempt is None or (attempt.service, attempt.segment) != (self.service, self.segment):
                raise InvalidArgument("pieces", f"{piece.name[:200]!r} is no object of {self.segment}")
        if len(set(self.objects)) < len([*self.objects]):
            raise InvalidArgument("pieces", "an object is named twice")

    def check_blocks(self, block_size: int) -> None:
        """Raises InvalidArgument unless each run of a piece begins with a block of the segment, and ends with one or at
        the segment's end: what remains of a block would take one more of the pool. Blocks of windows begin where a run
        does."""
        for start, end in (run for piece in self.pieces for run in piece.runs):
            if (start - self.start) % block_size or ((end - self.start) % block_size and end != self.end):
                message = (
                    f"positions {start} to {end} of a segment from {self.start} on are not whole blocks of {block_size}"
                )
                raise InvalidArgument("pieces", message)

    def _all_pieces(self) -> Sequence[PieceRef]:
        return self.pieces if self.windows is None else (*self.pieces, self.windows)

    def _check_runs(self) -> None:
        for piece in self.pieces:
            _check_rising(piece, "pieces")
        # in rising order, each begins where the one before ends
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
    """Raises InvalidArgument as `check` does."""
    manifest.check()
    return seal(KIND, VERSION, msgspec.msgpack.encode(manifest))


def decode_manifest(data: bytes, name: str) -> SegmentManifest:
    """The manifest that is kept as `name`. Raises DataLoss where it is damaged, senseless, or of a later version."""
    content = unseal(data, KIND, VERSION, name)
    try:
        manifest = msgspec.msgpack.decode(content, type=SegmentManifest)
        manifest.check()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument) as error:
        raise DataLoss(name, f"it makes no sense: {error}") from error
    return manifest
