"""Conversion of tokenizer messages."""

from longleaf.codec.names import encode_ids
from longleaf.types import Tokenized
from longleaf.v1 import tokenizer_service_pb2 as tokenizer_pb


def encode_tokenized(tokenized: Tokenized) -> tokenizer_pb.TokenizeResponse:
    message = tokenizer_pb.TokenizeResponse(token_ids=encode_ids(tokenized.token_ids))
    if tokenized.spans is not None:
        message.span_starts.extend(start for start, _ in tokenized.spans)
        message.span_ends.extend(end for _, end in tokenized.spans)
    return message


def decode_tokenized(message: tokenizer_pb.TokenizeResponse) -> Tokenized:
    """Without spans when there are none."""
    spans = tuple(zip(message.span_starts, message.span_ends, strict=True))
    return Tokenized(tuple(message.token_ids.ids), spans or None)
