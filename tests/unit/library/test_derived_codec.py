"""Conversions derived from a struct and a message's descriptor."""

from typing import Literal

import msgspec
import pytest

from longleaf.codec.derived import Wire, derive, derive_union
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import context_pb2 as context_pb
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_pb2 as generation_pb


def test_names_follow_aip() -> None:
    class Share(msgspec.Struct):
        rank: int
        num_tokens: int
        kv_bytes: int

    encode, decode = derive(Share, context_pb.RankShare)
    assert encode(Share(1, 2, 3)) == context_pb.RankShare(rank=1, token_count=2, kv_bytes=3)
    assert decode(context_pb.RankShare(rank=1, token_count=2)) == Share(1, 2, 0)


def test_times_texts_and_absent_fields() -> None:
    class Gone(msgspec.Struct, kw_only=True):
        loss_time: float
        member: int
        rank: int | None
        epoch: int | None
        node: str
        reason: Literal["unknown", "killed"]
        slot: Literal["unspecified", "waiting"]
        retry_time: float | None

    encode, decode = derive(Gone, cluster_pb.Loss, ignored=["slot_reason"], slot="slot_state")
    gone = Gone(loss_time=1.5, member=2, rank=0, epoch=3, node="a", reason="killed", slot="waiting", retry_time=-0.5)
    assert decode(encode(gone)) == gone
    later = cluster_pb.Loss(reason="melted", slot_state=cluster_pb.SLOT_STATE_REPLACED)
    nothing = Gone(
        loss_time=0.0, member=0, rank=None, epoch=None, node="", reason="unknown", slot="unspecified", retry_time=None
    )
    assert decode(later) == nothing
    assert decode(encode(nothing)) == nothing


def test_an_absent_field_has_its_default() -> None:
    class Asked(msgspec.Struct):
        span_count: int = 8
        layers: tuple[int, ...] = ()

    ignored = ["span_token_count", "per_token", "ranking", "confirm"]
    _, decode = derive(Asked, generation_pb.Provenance, ignored)
    assert decode(generation_pb.Provenance(layers=[1])) == Asked(8, (1,))
    assert decode(generation_pb.Provenance(span_count=0)) == Asked(0)


def test_items_are_converted() -> None:
    class Page(msgspec.Struct):
        ids: tuple[str, ...]

    encode, decode = derive(Page, generation_pb.TokenIds, ids=Wire("ids", int, str))
    assert decode(encode(Page(("1", "20")))) == Page(("1", "20"))


def test_a_union_is_a_oneof() -> None:
    class Range(msgspec.Struct):
        offset: int
        data: bytes

    derive(Range, ingest_pb.ArchiveChunk)
    encode, decode = derive_union(ingest_pb.ImportContextRequest, "payload", Range)
    assert decode(encode(Range(3, b"ab"))) == Range(3, b"ab")
    assert decode(ingest_pb.ImportContextRequest()) is None


class Unpaired(msgspec.Struct):
    start: int
    end: int
    step: int = 1


class Partial(msgspec.Struct):
    start: int


def test_fields_without_partner_are_errors() -> None:
    with pytest.raises(TypeError, match=r"Unpaired.step has no partner in longleaf.v1.TextRange"):
        derive(Unpaired, ingest_pb.TextRange)
    with pytest.raises(TypeError, match=r"no partner of \['end'\]"):
        derive(Partial, ingest_pb.TextRange)
    with pytest.raises(TypeError, match=r"no fields \['stop'\]"):
        derive(Partial, ingest_pb.TextRange, ["end"], stop="end")


def test_conversions_are_derived_once() -> None:
    class Once(msgspec.Struct):
        start: int
        end: int

    assert derive(Once, ingest_pb.TextRange) == derive(Once, ingest_pb.TextRange)
    with pytest.raises(TypeError, match="derived already"):
        derive(Once, ingest_pb.TextRange, start="end", end="start")
