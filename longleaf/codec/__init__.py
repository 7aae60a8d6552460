"""Domain types to protobuf messages and back, and errors to statuses: the only package that knows both sides.

Decoding a request raises InvalidArgument naming the field by its path on the wire. Decoding a response trusts it.
"""

from longleaf.codec.cluster import (
    decode_cluster,
    decode_draining,
    decode_verification,
    decode_verify,
    decode_watch,
    encode_cluster,
    encode_draining,
    encode_verification,
    encode_verify,
    encode_watch,
)
from longleaf.codec.context import (
    decode_context,
    decode_contexts,
    decode_fork,
    decode_ingest_piece,
    decode_ingest_progress,
    decode_update,
    encode_context,
    encode_fork,
    encode_ingest_piece,
    encode_ingest_progress,
    encode_update,
)
from longleaf.codec.fields import has_more_fields
from longleaf.codec.generation import (
    decode_cancel,
    decode_event,
    decode_generate,
    encode_cancel,
    encode_event,
    encode_generate,
    encode_resume,
)
from longleaf.codec.names import (
    BytesLike,
    as_bytes,
    as_text,
    context_id,
    context_name,
    decode_ids,
    encodable,
    encode_ids,
    is_series,
)
from longleaf.codec.sampling import decode_sampling, encode_sampling
from longleaf.codec.tokenizer import decode_tokenized, encode_tokenized

__all__ = [
    "BytesLike",
    "as_bytes",
    "as_text",
    "context_id",
    "context_name",
    "decode_cancel",
    "decode_cluster",
    "decode_context",
    "decode_contexts",
    "decode_draining",
    "decode_event",
    "decode_fork",
    "decode_generate",
    "decode_ids",
    "decode_ingest_piece",
    "decode_ingest_progress",
    "decode_sampling",
    "decode_tokenized",
    "decode_update",
    "decode_verification",
    "decode_verify",
    "decode_watch",
    "encodable",
    "encode_cancel",
    "encode_cluster",
    "encode_context",
    "encode_draining",
    "encode_event",
    "encode_fork",
    "encode_generate",
    "encode_ids",
    "encode_ingest_piece",
    "encode_ingest_progress",
    "encode_resume",
    "encode_sampling",
    "encode_tokenized",
    "encode_update",
    "encode_verification",
    "encode_verify",
    "encode_watch",
    "has_more_fields",
    "is_series",
]
