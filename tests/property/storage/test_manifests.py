"""Manifests and notes survive a round trip, and no other object is taken for one."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from longleaf.errors import DataLoss, InvalidArgument
from longleaf.positions import Rope
from longleaf.storage.context_note import ContextNote, decode_note, encode_note
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.envelope import unwrap, wrap
from longleaf.storage.manifest import KIND, VERSION, PieceRef, SegmentManifest, decode_manifest, encode_manifest
from longleaf.storage.names import Attempt, NotePlace, attempt_of_manifest, attempt_of_piece, place_of_note
from tests.support.kept_segments import manifest_of

ATTEMPT = Attempt("service-1", "service-1-7", "0af3")
IDS = st.from_regex("[a-z0-9][a-z0-9-]{0,99}", fullmatch=True)
CONTEXTS = st.from_regex("[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", fullmatch=True)


@st.composite
def manifests(draw) -> SegmentManifest:
    """Positions cut anywhere, and dealt to pieces in any way."""
    start, num_tokens = draw(st.sampled_from([0, 1, 4096])), draw(st.integers(1, 200))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=8)) - {num_tokens})
    bounds = [start, *(start + cut for cut in cuts), start + num_tokens]
    runs: dict[int, list[tuple[int, int]]] = {}
    for run in zip(bounds[:-1], bounds[1:], strict=True):
        runs.setdefault(draw(st.integers(0, 3)), []).append(run)
    attempt = Attempt(draw(IDS), draw(IDS), draw(IDS))
    windows = PieceRef(
        name=attempt.windows(0),
        runs=((draw(st.integers(start, start + num_tokens - 1)), start + num_tokens),),
        num_bytes=1,
        digest="ff",
    )
    return SegmentManifest(
        service=attempt.service,
        fingerprint=draw(st.text()),
        form=draw(st.text()),
        segment=attempt.segment,
        parent=draw(IDS) if start else None,
        start=start,
        num_tokens=num_tokens,
        rope=Rope(draw(st.integers(0, 2**31)), draw(st.booleans())),
        pieces=tuple(
            PieceRef(name=attempt.piece(i), runs=tuple(some), num_bytes=7, digest="aa") for i, some in runs.items()
        ),
        windows=draw(st.sampled_from([None, windows])),
        token_ids=draw(st.binary(min_size=4 * num_tokens, max_size=4 * num_tokens)),
    )


@given(manifests())
def test_a_manifest_comes_back(manifest):
    assert decode_manifest(encode_manifest(manifest), "name") == manifest


@given(manifests(), st.data())
def test_a_run_that_is_missing_moved_or_there_twice_is_refused(manifest, data):
    index = data.draw(st.integers(0, len(manifest.pieces) - 1))
    piece = manifest.pieces[index]
    at = data.draw(st.integers(0, len(piece.runs) - 1))
    start, end = piece.runs[at]
    change = data.draw(st.sampled_from(["drop", "twice", "grow", "shrink", "shift", "empty"]))
    changed = {
        "drop": [],
        "twice": [(start, end), (start, end)],
        "grow": [(start, end + 1)],
        "shrink": [(start, end - 1)],
        "empty": [(start, start), (start, end)],
        "shift": [(start - 1, end - 1)],
    }[change]
    runs = (*piece.runs[:at], *changed, *piece.runs[at + 1 :])
    pieces = (*manifest.pieces[:index], replace(piece, runs=runs), *manifest.pieces[index + 1 :])
    with pytest.raises(InvalidArgument) as caught:
        replace(manifest, pieces=pieces).check()
    assert caught.value.field == "pieces"


@given(manifests())
def test_what_contradicts_itself_is_refused(manifest):
    pieces = manifest.pieces
    intruder = replace(pieces[0], name=Attempt(manifest.service, "other", "1").piece(0))
    wrong = {
        "service": {"service": "../x"},
        "segment": {"segment": ""},
        "start": {"parent": None if manifest.start else "before"},
        "token_ids": {"token_ids": manifest.token_ids[:-1]},
        "pieces": {"pieces": (intruder, *pieces[1:])},
        "windows": {
            "windows": PieceRef(
                name=Attempt(manifest.service, manifest.segment, "1").windows(0), runs=(), num_bytes=1, digest=""
            )
        },
    }
    for field, change in wrong.items():
        with pytest.raises(InvalidArgument) as caught:
            replace(manifest, **change).check()
        assert caught.value.field == field
    named = {**wrong, "escapes": {"pieces": (replace(pieces[0], name="../../etc/passwd"), *pieces[1:])}}
    named["twice"] = {"windows": pieces[0]}
    for change in named.values():
        content = encode_unchecked(replace(manifest, **change))
        with pytest.raises(DataLoss, match="is invalid"):
            decode_manifest(content, "name")


@given(manifests(), st.integers(1, 2))
def test_windows_of_other_segments_are_refused(manifest, past):
    name = Attempt(manifest.service, manifest.segment, "1").windows(0)
    start, end = manifest.start, manifest.start + manifest.num_tokens
    for run in ((start - past, end), (start - past, start), (start, end + past)):
        with pytest.raises(InvalidArgument, match="windows: ") as caught:
            replace(manifest, windows=PieceRef(name=name, runs=(run,), num_bytes=1, digest="")).check()
        assert caught.value.field == "windows"


@given(manifests(), st.integers(1, 9))
def test_runs_are_whole_blocks_from_the_start_of_the_segment_on(manifest, block_size):
    runs = [run for piece in manifest.pieces for run in piece.runs]
    is_whole = all((low - manifest.start) % block_size == 0 for low, _ in runs)
    if is_whole:
        manifest.check_blocks(block_size)
    else:
        with pytest.raises(InvalidArgument, match=f"pieces: .* blocks of {block_size}") as caught:
            manifest.check_blocks(block_size)
        assert caught.value.field == "pieces"


def encode_unchecked(manifest):
    return wrap(KIND, VERSION, msgspec.msgpack.encode(manifest))


def test_every_flipped_bit_and_every_truncation_is_noticed():
    for whole, decode in (
        (encode_manifest(manifest_of(ATTEMPT)), lambda data: decode_manifest(data, "name")),
        (encode_note(NOTE), lambda data: decode_note(data, NOTE.place)),
    ):
        decode(whole)
        for at in range(len(whole)):
            for flip in (1, 0x80, 0xFF):
                damaged = bytearray(whole)
                damaged[at] ^= flip
                with pytest.raises(DataLoss):
                    decode(bytes(damaged))
            with pytest.raises(DataLoss):
                decode(whole[:at])
        with pytest.raises(DataLoss):
            decode(whole + b"\0")


COUNTS = st.integers(0, 2**63)
RECORD = ContextRecord(
    id="moby.dick",
    segment=7,
    num_tokens=8,
    ends=(4, 8),
    capacity=9,
    created=1.5,
    updated=2.5,
    expires=3.5,
    last_used=2.5,
)
NOTE = ContextNote(NotePlace("service-1", RECORD.id, 12), RECORD)


@given(st.binary(max_size=200))
def test_no_other_bytes_are_taken(data):
    with pytest.raises(DataLoss):
        decode_manifest(data, "name")
    with pytest.raises(DataLoss, match="is invalid"):
        decode_manifest(wrap(KIND, VERSION, data), "name")


@settings(max_examples=20)
@given(st.integers(1, 50))
def test_later_versions_differ_from_damage(more):
    with pytest.raises(DataLoss, match=f"version {VERSION + more}.*use a later one"):
        decode_manifest(wrap(KIND, VERSION + more, b"whatever"), "name")
    assert unwrap(wrap(b"note", 1, b"content"), b"note", 1 + more, "name") == b"content"


def test_a_note_is_no_manifest_and_of_its_place_alone():
    with pytest.raises(DataLoss, match="not a manifest"):
        decode_manifest(encode_note(NOTE), "name")
    for place in (NOTE.place._replace(number=13), NOTE.place._replace(context="other")):
        with pytest.raises(DataLoss, match="it was written as services/service-1/notes/moby.dick/"):
            decode_note(encode_note(NOTE), place)


@given(IDS, IDS, IDS, CONTEXTS, st.integers(0, 10**20 - 1), st.integers(0, 10**6))
def test_names_identify_their_objects(service, segment, attempt, context, number, index):
    place, tried = NotePlace(service, context, number), Attempt(service, segment, attempt)
    assert place_of_note(place.name) == place
    assert attempt_of_manifest(tried.manifest) == tried
    for name in (tried.piece(index), tried.windows(index)):
        assert attempt_of_piece(name) == tried
        assert attempt_of_manifest(name) is place_of_note(name) is None
    for name in (place.name, tried.manifest, tried.piece(index)):
        unfinished = f"{name}.0123456789abcdef.part"
        assert attempt_of_manifest(unfinished) is attempt_of_piece(unfinished) is place_of_note(unfinished) is None


@given(CONTEXTS, st.tuples(st.integers(0, 10**20 - 1), st.integers(0, 10**20 - 1)))
def test_later_notes_have_later_names(context, numbers):
    low, high = sorted(numbers)
    assert NotePlace("a", context, low).name <= NotePlace("a", context, high).name


@given(
    IDS,
    st.integers(0, 2**63),
    st.booleans(),
    st.builds(
        ContextRecord,
        id=CONTEXTS,
        segment=COUNTS,
        num_tokens=COUNTS,
        ends=st.lists(COUNTS, max_size=3).map(tuple),
        capacity=COUNTS,
        created=st.floats(0, 2e9),
        updated=st.floats(0, 2e9),
        last_used=st.just(0.0),
        display_name=st.text(),
        is_pinned=st.booleans(),
        expires=st.none() | st.floats(0, 2e9),
    ),
)
def test_a_note_comes_back(service, number, is_deleted, record):
    record = None if is_deleted else replace(record, last_used=record.updated)
    note = ContextNote(NotePlace(service, record.id if record else "gone", number), record)
    assert decode_note(encode_note(note), note.place) == note


@pytest.mark.parametrize("segment", [None, "service-1", "service-1-", "service-1-x", "service-12-7", "other-7"])
def test_a_note_without_a_segment_of_its_service_is_damaged(segment):
    content = msgspec.msgpack.decode(unwrap(encode_note(NOTE), b"note", 1, "name"))
    data = wrap(b"note", 1, msgspec.msgpack.encode({**content, "segment": segment}))
    with pytest.raises(DataLoss, match="does not belong to the service"):
        decode_note(data, NOTE.place)
