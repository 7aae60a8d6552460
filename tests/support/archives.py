"""Contexts that can be packed: paths of segments, some with keys on storage, whose bytes are drawn from a seed."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from longleaf.context_archive.frames import PREAMBLE, Frame, Kind
from longleaf.context_archive.reader import ArchiveReader, Section
from longleaf.context_archive.records import ContextHead, SegmentHead, encode
from longleaf.context_archive.writer import ArchiveWriter, keys_of
from longleaf.document_text import STRIDE, DocumentText, TextFile
from longleaf.fingerprint import Fingerprint
from longleaf.little_endian import pack
from longleaf.positions import Rope
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt
from longleaf.storage.segment_record import SegmentRecord

FINGERPRINT = Fingerprint("ab" * 32, {"config.json": "01", "model.safetensors": "02"})
FORM = "float32 2x4"
BLOCK_SIZE = 1
SERVICE = "0123"


@dataclass
class Packable:
    """A context: its head, its path, and its stored pieces."""

    head: ContextHead
    path: Sequence[SegmentRecord]
    manifests: dict[int, SegmentManifest] = field(default_factory=dict[int, SegmentManifest])
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def packing(self) -> ArchiveWriter:
        return ArchiveWriter(self.head, self.path, self.manifests)

    def packed(self) -> bytes:
        """All bytes of its archive."""
        return bytes_from(self.packing(), self.objects)


def packed_early(given: Packable) -> bytes:
    """Its archive as early versions wrote it: with whole segments, their keys too, where the context uses a part."""
    archive, digest = bytearray(PREAMBLE), blake3(PREAMBLE)

    def add(kind: Kind, content: bytes) -> None:
        frame = Frame.from_content(kind, content).encode()
        digest.update(frame)
        archive.extend(frame + content)

    add("head", encode(given.head))
    ends = [*(segment.start for segment in given.path[1:]), given.head.num_tokens]
    for segment, end in zip(given.path, ends, strict=True):
        keys, num_tokens = keys_of(given.manifests[segment.id]), len(segment.token_ids)
        reported = SegmentHead(num_used=end - segment.start, num_tokens=num_tokens, rope=segment.rope, keys=keys)
        add("segment", encode(reported))
        add("ids", segment.token_ids.tobytes())
        for name in given.manifests[segment.id].objects:
            add("piece", given.objects[name])
    add("end", digest.digest())
    return bytes(archive)


def bytes_from(packing: ArchiveWriter, objects: dict[str, bytes], offset: int = 0) -> bytes:
    """The bytes of an archive from `offset` on."""
    found = bytearray()
    for content, passed in packing.stretches(offset):
        found += memoryview(objects[content.name] if isinstance(content, PieceRef) else content)[passed:]
    return bytes(found)


def packable(
    sizes: Sequence[tuple[int, int]] = ((6, 6), (5, 5)),
    keyed: Sequence[bool] = (True, True),
    piece_tokens: int = 4,
    piece_bytes: int = 40,
    has_windows: bool = True,
    seed: int = 1,
    vocabulary: int = 1 << 17,
    name: str = "moby",
) -> Packable:
    """A context of segments with so many tokens, of which so many are used; those that are `keyed` have pieces of
    `piece_tokens` positions each."""
    rng, path, start = random.Random(seed), list[SegmentRecord](), 0
    for number, (num_tokens, num_used) in enumerate(sizes):
        ids = array("I", [rng.randrange(vocabulary) for _ in range(num_tokens)])
        parent = path[-1].id if path else None
        rope = Rope(scaled_for=number, is_double=bool(number))
        text = document_text(num_tokens) if number % 2 else None
        reported = {"id": 7 + 3 * number, "parent": parent, "start": start}
        path.append(SegmentRecord(**reported, rope=rope, token_ids=ids, text=text))
        start += num_used
    head = ContextHead(
        fingerprint=FINGERPRINT,
        model="fake",
        context=name,
        num_tokens=start,
        ends=(1, start) if start > 1 else (start,),
        capacity=4096,
        created=1.5,
        updated=2.5,
        display_name="Moby-Dick",
        is_pinned=True,
    )
    found = Packable(head, path)
    for segment, has_keys in zip(path, keyed, strict=True):
        if has_keys:
            _keep(found, segment, piece_tokens, piece_bytes, has_windows, rng)
    return found


def document_text(num_tokens: int) -> DocumentText:
    """Of a document in two files, whose tokens are four bytes long."""
    starts = pack(array("Q", range(0, 4 * num_tokens, 4 * STRIDE))).tobytes()
    files = (TextFile("a.txt", 0), TextFile("b.txt", 2 * num_tokens))
    return DocumentText(num_lead=0, starts=starts, num_bytes=4 * num_tokens, files=files)


def _keep(
    found: Packable, segment: SegmentRecord, piece_tokens: int, piece_bytes: int, has_windows: bool, rng: random.Random
) -> None:
    attempt = Attempt(SERVICE, f"{SERVICE}-{segment.id}", "a")

    def put(name: str, start: int, end: int) -> PieceRef:
        content = found.objects[name] = rng.randbytes(piece_bytes)
        return PieceRef(name=name, runs=((start, end),), num_bytes=len(content), digest=blake3(content).hexdigest())

    firsts = range(segment.start, segment.end, piece_tokens)
    pieces = [put(attempt.piece(i), at, min(at + piece_tokens, segment.end)) for i, at in enumerate(firsts)]
    found.manifests[segment.id] = SegmentManifest(
        service=SERVICE,
        fingerprint=FINGERPRINT.digest,
        form=FORM,
        segment=attempt.segment,
        parent=None if segment.parent is None else f"{SERVICE}-{segment.parent}",
        start=segment.start,
        num_tokens=len(segment.token_ids),
        rope=segment.rope,
        pieces=tuple(pieces),
        windows=put(attempt.windows(0), max(segment.start, segment.end - 2), segment.end) if has_windows else None,
        token_ids=segment.token_ids.tobytes(),
    )


def unpack(archive: bytes, cuts: Sequence[int] = ()) -> list[Section]:
    """The records of an archive that arrives cut at these offsets. Raises InvalidArgument."""
    unpacking, found = ArchiveReader(), list[Section]()
    unpacking.expect(FORM, BLOCK_SIZE)
    bounds = [0, *sorted(cuts), len(archive)]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        data = memoryview(archive)[start:end]
        while data:
            count, reported = unpacking.feed(data)
            data = data[count:]
            found += [] if reported is None else [reported]
    unpacking.check_complete()
    return found
