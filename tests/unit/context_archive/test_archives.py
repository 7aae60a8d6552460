"""Damaged, truncated, reordered or oversized archives are reported, at every position."""

import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from msgspec.structs import replace

from longleaf.context_archive.frames import FRAME_BYTES, MAGIC, PREAMBLE, Frame
from longleaf.context_archive.reader import ArchiveReader, IdsSection
from longleaf.context_archive.records import (
    MAX_HEAD_BYTES,
    ContextHead,
    KvSection,
    SegmentHead,
    decode_segment,
    encode,
    max_segment_bytes,
)
from longleaf.errors import InvalidArgument
from longleaf.storage.context_record import sound_ends
from longleaf.storage.manifest import PieceRef
from tests.support.archives import FORM, bytes_from, packable, unpack

HEAD = packable().head
ROPE = packable().path[0].rope


def record(kind: str, content: bytes) -> bytes:
    return Frame(kind, len(content), blake3(content).hexdigest()).encode() + content


def test_archive_round_trip() -> None:
    given = packable(((8, 8), (5, 5), (9, 8)), (True, False, True))
    reported = unpack(given.packed())
    assert reported[0] == given.head
    segments = [one for one in reported if isinstance(one, SegmentHead)]
    assert [one.text is not None for one in segments] == [i % 2 == 1 for i in range(len(segments))]
    assert [(one.num_used, one.num_tokens, one.keys is not None) for one in segments] == [
        (8, 8, True),
        (5, 5, False),
        (8, 8, False),  # all its keys are exported, and would reveal tokens of another context after the end
    ]
    ids = [one.token_ids for one in reported if isinstance(one, IdsSection)]
    assert ids == [given.path[0].token_ids, given.path[1].token_ids, given.path[2].token_ids[:8]]
    assert [bytes(one) for one in reported if isinstance(one, bytearray)] == [
        given.objects[name] for name in given.manifests[given.path[0].id].objects
    ]


def test_unused_part_of_a_shared_segment_is_not_exported() -> None:
    """The rest of the segment belongs to another context, possibly of another tenant if tenants share prefixes."""
    given = packable(((8, 7), (5, 4)), vocabulary=200)
    for segment, unused in zip(given.path, (7, 4), strict=True):
        segment.token_ids[unused:] = array("I", [0xABCDEF01] * (len(segment.token_ids) - unused))
    archive = given.packed()
    assert (0xABCDEF01).to_bytes(4, "little") not in archive
    assert not [content for content in given.objects.values() if content in archive]


def test_archive_is_deterministic_from_any_offset() -> None:
    given = packable()
    whole, packing = given.packed(), packable().packing()
    assert (len(whole), packing.digest) == (packing.num_bytes, given.packing().digest)
    assert all(bytes_from(packing, given.objects, offset) == whole[offset:] for offset in range(len(whole) + 1))
    other = packable()
    other.head = replace(other.head, display_name="The Whale")
    assert other.packing().digest != packing.digest
    assert packable(seed=2).packing().digest != packing.digest


def test_truncation_is_detected_at_every_byte() -> None:
    whole = packable().packed()
    for end in range(len(whole)):
        with pytest.raises(
            InvalidArgument, match=rf"archive: it is truncated: its end is missing \(after {end:,} bytes\)"
        ):
            unpack(whole[:end])


def test_flipped_bit_is_detected_at_every_byte() -> None:
    whole = packable().packed()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(InvalidArgument, match="archive: "):
            unpack(bytes(damaged))


def test_data_after_the_end_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="after its end"):
        unpack(packable().packed() + b"\0")


def test_swapped_and_missing_records_are_detected() -> None:
    whole = packable().packed()
    records, at = list[bytes](), len(PREAMBLE)
    while at < len(whole):
        end = at + FRAME_BYTES + Frame.decode(whole[at : at + FRAME_BYTES]).num_bytes
        records.append(whole[at:end])
        at = end
    assert PREAMBLE + b"".join(records) == whole
    for place in range(len(records) - 1):
        swapped = [*records[:place], records[place + 1], records[place], *records[place + 2 :]]
        with pytest.raises(InvalidArgument, match="archive: "):
            unpack(PREAMBLE + b"".join(swapped))
        with pytest.raises(InvalidArgument, match="archive: "):
            unpack(PREAMBLE + b"".join([*records[:place], *records[place + 1 :]]))


def test_end_record_of_another_archive_is_rejected() -> None:
    one, other = packable().packed(), packable(seed=2).packed()
    assert len(one) == len(other)
    with pytest.raises(InvalidArgument, match="its end belongs to another archive"):
        unpack(one[: -FRAME_BYTES - 32] + other[-FRAME_BYTES - 32 :])


@pytest.mark.parametrize(
    ("kind", "num_bytes", "message"),
    [
        ("head", MAX_HEAD_BYTES + 1, "'head' has 1,048,577 bytes; allowed are 1 to 1,048,576"),
        ("head", 1 << 63, "allowed are 1 to"),
        ("head", 0, "'head' has 0 bytes"),
        ("piece", 10, "found 'piece' where 'head' is expected"),
        ("\x9f", 10, "where 'head' is expected"),
    ],
)
def test_declared_lengths_are_not_trusted(kind: str, num_bytes: int, message: str) -> None:
    frame = Frame(kind, num_bytes, "00" * 32)
    with pytest.raises(InvalidArgument, match=message):
        unpack(PREAMBLE + frame.encode())


def test_records_have_their_declared_sizes() -> None:
    begin = PREAMBLE + record("head", encode(HEAD))
    segment = SegmentHead(num_used=11, num_tokens=11, rope=ROPE, keys=None)
    begin += record("segment", encode(segment))
    with pytest.raises(InvalidArgument, match="'ids' has 48 bytes; allowed are 44 to 44"):
        unpack(begin + record("ids", bytes(48)))
    with pytest.raises(InvalidArgument, match="found 'end' where 'ids' is expected"):
        unpack(begin + record("end", bytes(32)))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (replace(HEAD, num_tokens=0), "0 tokens"),
        (replace(HEAD, capacity=10), "a capacity of 10"),
        (replace(HEAD, capacity=1 << 60), "a capacity of"),
        (replace(HEAD, ends=(12,)), "its ends"),
        (replace(HEAD, ends=(0, 11)), "its ends"),
        (replace(HEAD, ends=(5,)), "its ends"),
        (replace(HEAD, ends=(5, 3, 11)), "its ends"),
        (replace(HEAD, ends=(5, 5, 11)), "its ends"),
        (replace(HEAD, ends=(5, 11, 11)), "its ends"),
        (replace(HEAD, num_tokens=4000, ends=tuple(range(1, 4001))), "its ends"),
        (
            replace(HEAD, fingerprint=replace(HEAD.fingerprint, files=dict.fromkeys(map(str, range(10_001)), ""))),
            "files",
        ),
        (replace(HEAD, display_name="x" * 257), "more than 256 characters"),
    ],
)
def test_invalid_heads_are_rejected(head: ContextHead, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        unpack(PREAMBLE + record("head", encode(head)))


def test_head_without_ends_ends_at_its_last_token() -> None:
    replace(HEAD, ends=()).check()
    assert sound_ends((), 11) == sound_ends((11,), 11) == (11,)


RUN = ((0, 1),)


def with_keys(*runs: tuple[tuple[int, int], ...], windows: Any = None, form: str = FORM) -> SegmentHead:
    parts = tuple(PieceRef(runs=some, num_bytes=1, digest="0" * 64) for some in runs)
    windows = windows and PieceRef(runs=windows, num_bytes=1, digest="0" * 64)
    return SegmentHead(num_used=11, num_tokens=11, rope=ROPE, keys=KvSection(form, parts, windows))


def test_pieces_are_described_without_their_names() -> None:
    piece = PieceRef(name="services/a/segments/a-1/1/piece-00000.safetensors", runs=RUN, num_bytes=9, digest="00")
    described = {"runs": [[0, 1]], "num_bytes": 9, "digest": "00"}
    content = msgspec.msgpack.decode(encode(with_keys(RUN)))["keys"]["pieces"][0]
    assert list(content) == list(described)
    assert msgspec.msgpack.encode(replace(piece, name="")) == msgspec.msgpack.encode(described)
    assert list(msgspec.msgpack.decode(msgspec.msgpack.encode(piece))) == ["name", *described]


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (with_keys(*[RUN] * 12), "has 12 pieces for 11 blocks"),
        (with_keys(RUN * 12), "a segment of 11 blocks has 12 runs, and 0 of windows"),
        (with_keys(RUN * 6, RUN * 6), "has 12 runs"),
        (with_keys(RUN, windows=RUN * 20), "20 of windows"),
        (with_keys(RUN * 70_000), "has 70,000 runs"),
    ],
)
def test_pieces_and_runs_are_bounded_by_blocks(segment: SegmentHead, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        unpack(PREAMBLE + record("head", encode(HEAD)) + record("segment", encode(segment)))


def test_runs_of_skipped_keys_are_not_decoded() -> None:
    others = with_keys(RUN * 70_000, windows=RUN * 20, form="another")
    reported = decode_segment(encode(others), 11, FORM, 1)
    assert reported.keys is not None
    assert [part.runs for part in reported.keys.parts] == [(), ()]


def test_invalid_runs_are_rejected() -> None:
    wrong = encode(with_keys(RUN)).replace(msgspec.msgpack.encode(RUN), msgspec.msgpack.encode("ab"))
    with pytest.raises(InvalidArgument, match="it is invalid"):
        decode_segment(wrong, 11, FORM, 1)


def test_segment_records_are_bounded_by_the_remaining_tokens() -> None:
    begin = PREAMBLE + record("head", encode(HEAD))
    most = max_segment_bytes(HEAD.num_tokens)
    assert max_segment_bytes(1 << 20) < 9 << 20
    with pytest.raises(InvalidArgument, match=f"'segment' has {most + 1:,} bytes; allowed are 1 to {most:,}"):
        unpack(begin + Frame("segment", most + 1, "00" * 32).encode())


def test_too_many_runs_are_rejected_before_decoding() -> None:
    """Each run takes three bytes encoded and a hundred in memory."""
    segment = with_keys(RUN * 1_000_000)
    begin, reported = PREAMBLE + record("head", encode(HEAD)), record("segment", encode(segment))
    assert len(reported) < max_segment_bytes(HEAD.num_tokens)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="its keys has"):
            unpack(begin + reported)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(reported)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("num_used", "num_tokens"), [(0, 5), (12, 12), (5, 4), (5, 6), (11, 1 << 40), (-1, 5)])
def test_invalid_segments_are_rejected(num_used: int, num_tokens: int) -> None:
    segment = SegmentHead(num_used=num_used, num_tokens=num_tokens, rope=ROPE, keys=None)
    with pytest.raises(InvalidArgument, match="a segment has"):
        unpack(PREAMBLE + record("head", encode(HEAD)) + record("segment", encode(segment)))


def test_invalid_messages_are_rejected() -> None:
    for content in (b"\xc1", b"\x91" * 100_000, encode(HEAD)[:-1]):
        with pytest.raises(InvalidArgument, match="it is invalid"):
            unpack(PREAMBLE + record("head", content))


def test_later_versions_and_other_files_are_distinguished_from_damage() -> None:
    with pytest.raises(InvalidArgument, match="it is of version 2"):
        unpack(MAGIC + (2).to_bytes(8, "little"))
    with pytest.raises(InvalidArgument, match="this is not an exported context"):
        unpack(b"Call me Ishmael. Some years ago")


def test_reader_buffers_at_most_one_record() -> None:
    given, unpacking, most = packable(piece_bytes=5000), ArchiveReader(), 0
    data = memoryview(given.packed())
    while data:
        count, _ = unpacking.feed(data[:100])
        data = data[count:]
        most = max(most, len(unpacking._content))
    assert most < 5000
