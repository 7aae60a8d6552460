"""Contexts as services write them to storage: a manifest for each segment, and a note for each change."""

from msgspec.structs import replace

from longleaf.storage.context_note import ContextNote, encode_note
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import PieceRef, SegmentManifest, encode_manifest
from longleaf.storage.names import Attempt, NotePlace
from longleaf.storage.segment_record import SegmentRecord
from longleaf.storage.store import Store

SERVICE = "5e" * 16
CHECKPOINT = "c0ffee"
PIECE_BYTES = 40


def name_of(number: int, service: str = SERVICE) -> str:
    return f"{service}-{number}"


def manifest_of(
    record: SegmentRecord, service: str = SERVICE, fingerprint: str = CHECKPOINT, attempt: str = "1"
) -> SegmentManifest:
    """In two pieces, or one where there is only one token."""
    place = Attempt(service, name_of(record.id, service), attempt)
    middle = (record.start + record.end) // 2
    runs = [(start, end) for start, end in ((record.start, middle), (middle, record.end)) if start < end]
    pieces = [
        PieceRef(name=place.piece(i), runs=(run,), num_bytes=PIECE_BYTES, digest="00") for i, run in enumerate(runs)
    ]
    return SegmentManifest(
        service=service,
        fingerprint=fingerprint,
        form="float32",
        segment=place.segment,
        parent=None if record.parent is None else name_of(record.parent, service),
        start=record.start,
        num_tokens=len(record.token_ids),
        rope=record.rope,
        pieces=tuple(pieces),
        windows=None,
        token_ids=record.token_ids.tobytes(),
    )


def manifest_name(manifest: SegmentManifest, attempt: str = "1") -> str:
    return Attempt(manifest.service, manifest.segment, attempt).manifest


def note_of(record: ContextRecord, number: int, service: str = SERVICE) -> ContextNote:
    noted = replace(record, last_used=record.updated, num_hits=0, upload_id="")
    return ContextNote(NotePlace(service, record.id, number), noted)


def deletion(context: str, number: int, service: str = SERVICE) -> ContextNote:
    return ContextNote(NotePlace(service, context, number), None)


def put_manifest(store: Store, manifest: SegmentManifest, attempt: str = "1") -> str:
    """Puts pieces and manifest; its name."""
    for piece in manifest.pieces:
        store.put(piece.name, [bytes(piece.num_bytes)])
    name = manifest_name(manifest, attempt)
    store.put(name, [encode_manifest(manifest)])
    return name


def put_note(store: Store, note: ContextNote) -> str:
    store.put(note.place.name, [encode_note(note)])
    return note.place.name
