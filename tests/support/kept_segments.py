"""Segments and notes in the format of services, with arbitrary bytes."""

from longleaf.positions import Rope
from longleaf.storage.context_note import ContextNote, encode_note
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import PieceRef, SegmentManifest, encode_manifest
from longleaf.storage.names import Attempt, NotePlace
from longleaf.storage.store import Store


def manifest_of(attempt: Attempt, num_pieces: int = 2, start: int = 0, tokens: int = 8) -> SegmentManifest:
    """A segment whose pieces hold `tokens` positions each, one after the other."""
    firsts = [start + tokens * number for number in range(num_pieces)]
    pieces = [
        PieceRef(name=attempt.piece(i), runs=((first, first + tokens),), num_bytes=4, digest="00")
        for i, first in enumerate(firsts)
    ]
    return SegmentManifest(
        service=attempt.service,
        fingerprint="checkpoint",
        form="float32",
        segment=attempt.segment,
        parent="before-1" if start else None,
        start=start,
        num_tokens=num_pieces * tokens,
        rope=Rope(scaled_for=start, is_double=True),
        pieces=tuple(pieces),
        windows=None,
        token_ids=bytes(4 * num_pieces * tokens),
    )


def keep(store: Store, attempt: Attempt, num_pieces: int = 2) -> set[str]:
    """Puts pieces and manifest of a segment; all their names."""
    manifest = manifest_of(attempt, num_pieces)
    for name in manifest.objects:
        store.put(name, [b"keys"], is_new=True)
    store.put(attempt.manifest, [encode_manifest(manifest)], is_new=True)
    return {attempt.manifest, *manifest.objects}


def put_note(store: Store, service: str, context: str, number: int, is_deleted: bool = False) -> str:
    """Puts a note; its name."""
    record = ContextRecord(
        id=context, segment=1, num_tokens=8, ends=(8,), capacity=8, created=0.0, updated=0.0, last_used=0.0
    )
    note = ContextNote(NotePlace(service, context, number), None if is_deleted else record)
    store.put(note.place.name, [encode_note(note)], is_new=True)
    return note.place.name
