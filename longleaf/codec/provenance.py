"""Conversion of source attribution."""

from collections.abc import Iterable, Sequence
from typing import get_args

from longleaf.codec.names import check_range
from longleaf.errors import InvalidArgument
from longleaf.types import MIN_SPAN_TOKENS, Attribution, Provenance, Ranking, Source, TokenRange
from longleaf.v1 import generation_pb2 as generation_pb
from longleaf.v1 import generation_service_pb2 as service_pb

RANKINGS: tuple[Ranking, ...] = ("raw", *get_args(Ranking))
"""The ranking of each enum number. Number 0 (unset) means raw."""
MAX_LAYERS = 4096
MAX_HIDDEN = 1024
"""Maximum number of hidden ranges of a request."""
MAX_SPANS = 64


def encode_provenance(provenance: Provenance) -> generation_pb.Provenance:
    """Raises InvalidArgument when a value does not fit its field."""
    if provenance.ranking not in RANKINGS:
        raise InvalidArgument("provenance.ranking", f"{provenance.ranking!r} is neither raw nor contrast")
    message = generation_pb.Provenance(
        ranking=generation_pb.Ranking.Name(RANKINGS.index(provenance.ranking, 1)),
        span_count=check_range("provenance.span_count", provenance.num_spans, 1, MAX_SPANS),
        per_token=provenance.per_token,
        confirm=provenance.confirm,
    )
    if provenance.span_tokens is not None:
        message.span_token_count = check_range("provenance.span_token_count", provenance.span_tokens, 1, 2**31 - 1)
    message.layers.extend(
        check_range(f"provenance.layers[{i}]", layer, 0, 2**31 - 1) for i, layer in enumerate(provenance.layers)
    )
    return message


def decode_provenance(message: generation_pb.Provenance) -> Provenance:
    """Raises InvalidArgument naming the field."""
    if len(message.layers) > MAX_LAYERS:
        raise InvalidArgument("provenance.layers", f"must be at most {MAX_LAYERS:,} layers")
    if not 0 <= message.ranking < len(RANKINGS):
        raise InvalidArgument("provenance.ranking", f"{message.ranking} is not a ranking of this service")
    given = message.span_token_count if message.HasField("span_token_count") else None
    if given is not None and (given < MIN_SPAN_TOKENS or given & (given - 1)):
        raise InvalidArgument(
            "provenance.span_token_count", f"{given:,} must be a power of two, at least {MIN_SPAN_TOKENS}"
        )
    count = message.span_count if message.HasField("span_count") else Provenance().num_spans
    return Provenance(
        span_tokens=given,
        num_spans=check_range("provenance.span_count", count, 1, MAX_SPANS),
        layers=tuple(message.layers),
        per_token=message.per_token,
        ranking=RANKINGS[message.ranking],
        confirm=message.confirm,
    )


def encode_hidden(hidden: Sequence[TokenRange]) -> list[generation_pb.TokenRange]:
    """Raises InvalidArgument when a value does not fit its field."""
    if len(hidden) > MAX_HIDDEN:
        raise InvalidArgument("hidden", f"must be at most {MAX_HIDDEN:,} ranges")
    return [
        generation_pb.TokenRange(
            token_start=check_range(f"hidden[{i}]", start, 0, 2**63 - 1),
            token_end=check_range(f"hidden[{i}]", end, 0, 2**63 - 1),
        )
        for i, (start, end) in enumerate(hidden)
    ]


def decode_hidden(message: service_pb.GenerateRequest) -> tuple[TokenRange, ...]:
    """Raises InvalidArgument naming the field if ranges are empty, overlap, or are not in ascending order."""
    if len(message.hidden) > MAX_HIDDEN:
        raise InvalidArgument("hidden", f"must be at most {MAX_HIDDEN:,} ranges")
    found = tuple((each.token_start, each.token_end) for each in message.hidden)
    last = 0
    for i, (start, end) in enumerate(found):
        text = f"tokens {start:,} to {end:,}"
        if not 0 <= start < end:
            raise InvalidArgument(f"hidden[{i}]", f"{text} is not a valid range")
        if start < last:
            raise InvalidArgument(f"hidden[{i}]", f"{text} overlaps the previous range, or is out of order")
        last = end
    return found


def encode_attribution(attribution: Attribution) -> generation_pb.Attribution:
    return generation_pb.Attribution(
        sources=map(_encode_source, attribution.sources),
        context_share=attribution.context_share,
        prompt_share=attribution.prompt_share,
        answer_share=attribution.answer_share,
        sink_share=attribution.sink_share,
        token_count=attribution.num_tokens,
    )


def _encode_source(source: Source) -> generation_pb.Source:
    message = generation_pb.Source(
        token_start=source.token_start,
        token_end=source.token_end,
        share=source.share,
        largest_share=source.largest_share,
        largest_layer=source.largest_layer,
        largest_head=source.largest_head,
        contrast=source.contrast,
        drop=source.drop,
        file=source.file,
    )
    if source.bytes is not None:
        start, end = source.bytes
        message.bytes.CopyFrom(generation_pb.ByteRange(byte_start=start, byte_end=end))
    return message


def decode_attribution(message: generation_pb.Attribution) -> Attribution:
    return Attribution(
        sources=tuple(_decode_sources(message.sources)),
        context_share=message.context_share,
        prompt_share=message.prompt_share,
        answer_share=message.answer_share,
        sink_share=message.sink_share,
        num_tokens=message.token_count,
    )


def _decode_sources(sources: Iterable[generation_pb.Source]) -> Iterable[Source]:
    for each in sources:
        yield Source(
            token_start=each.token_start,
            token_end=each.token_end,
            share=each.share,
            largest_share=each.largest_share,
            largest_layer=each.largest_layer,
            largest_head=each.largest_head,
            contrast=each.contrast if each.HasField("contrast") else None,
            drop=each.drop if each.HasField("drop") else None,
            bytes=(each.bytes.byte_start, each.bytes.byte_end) if each.HasField("bytes") else None,
            file=each.file,
        )
