"""Conversion of source attribution."""

from collections.abc import Sequence
from typing import get_args

from longleaf.codec.derived import derive
from longleaf.codec.names import check_range
from longleaf.errors import InvalidArgument
from longleaf.types import MIN_SPAN_TOKENS, Attribution, Provenance, Ranking, TokenRange
from longleaf.v1 import generation_pb2 as generation_pb
from longleaf.v1 import generation_service_pb2 as service_pb

RANKINGS: tuple[Ranking, ...] = get_args(Ranking)
MAX_LAYERS = 4096
MAX_HIDDEN = 1024
"""Maximum number of hidden ranges of a request."""
MAX_SPANS = 64
encode_attribution, decode_attribution = derive(Attribution, generation_pb.Attribution)
_encode_provenance, _decode_provenance = derive(Provenance, generation_pb.Provenance)
"""Without a ranking: contrast."""


def encode_provenance(provenance: Provenance) -> generation_pb.Provenance:
    """Raises InvalidArgument when a value does not fit its field."""
    if provenance.ranking not in RANKINGS:
        raise InvalidArgument("provenance.ranking", f"{provenance.ranking!r} is neither contrast nor raw")
    check_range("provenance.span_count", provenance.num_spans, 1, MAX_SPANS)
    if provenance.span_tokens is not None:
        check_range("provenance.span_token_count", provenance.span_tokens, 1, 2**31 - 1)
    for i, layer in enumerate(provenance.layers):
        check_range(f"provenance.layers[{i}]", layer, 0, 2**31 - 1)
    return _encode_provenance(provenance)


def decode_provenance(message: generation_pb.Provenance) -> Provenance:
    """Raises InvalidArgument naming the field."""
    if len(message.layers) > MAX_LAYERS:
        raise InvalidArgument("provenance.layers", f"must be at most {MAX_LAYERS:,} layers")
    if message.ranking not in generation_pb.Ranking.values():
        raise InvalidArgument("provenance.ranking", f"{message.ranking} is not a ranking of this service")
    given = message.span_token_count if message.HasField("span_token_count") else None
    if given is not None and (given < MIN_SPAN_TOKENS or given & (given - 1)):
        raise InvalidArgument(
            "provenance.span_token_count", f"{given:,} must be a power of two, at least {MIN_SPAN_TOKENS}"
        )
    provenance = _decode_provenance(message)
    check_range("provenance.span_count", provenance.num_spans, 1, MAX_SPANS)
    return provenance


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
