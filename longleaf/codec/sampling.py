"""Conversion of sampling parameters."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from longleaf.codec.names import BytesLike, check_utf8
from longleaf.errors import InvalidArgument
from longleaf.sampling import GREEDY, MAX_BIASES, MAX_STOP_TOKENS, MAX_STOPS, SamplingParams
from longleaf.types import SamplingOptions
from longleaf.v1 import generation_pb2 as generation_pb

_WIRE_NAMES = {"max_tokens": "max_token_count", "stop_tokens": "stop_token_ids", "num_logprobs": "logprob_count"}
"""Sampling's fields whose names differ on the wire."""
_COLLECTIONS = ("stop", "stop_tokens", "logit_bias")
"""Repeated fields, for which empty means absent."""


def encode_sampling(options: SamplingOptions) -> generation_pb.SamplingParams:
    """Encodes the sampling parameters among `options`. Raises InvalidArgument when a value does not fit its field."""
    message = generation_pb.SamplingParams()
    values: Mapping[str, object] = options
    for name, value in values.items():
        if value is not None and name in SamplingOptions.__annotations__:
            _set(message, name, value)
    return message


def _set(message: generation_pb.SamplingParams, name: str, value: Any) -> None:
    field = _WIRE_NAMES.get(name, name)
    if name in ("stop", "stop_tokens") and _is_text(value):  # a single string, not a sequence of strings
        kind = "strings" if name == "stop" else "token ids"
        raise InvalidArgument(f"sampling.{field}", f"{type(value).__name__} is not a sequence of {kind}")
    try:
        if name == "stop":
            message.stop.extend(check_utf8(stop, "sampling.stop") for stop in value)
        elif name == "stop_tokens":
            message.stop_token_ids.extend(value)
        elif name == "logit_bias":
            message.logit_bias.update(value)
        else:
            setattr(message, field, value)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        if isinstance(error, ValueError):
            SamplingParams(**{name: value}).check()  # raises with the limit
        raise InvalidArgument(f"sampling.{field}", f"{value!r} does not fit: {error}") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str | BytesLike)


def _check_counts(message: generation_pb.SamplingParams) -> None:
    """Checked before any conversion."""
    for field, values, limit, kind in (
        ("logit_bias", message.logit_bias, MAX_BIASES, "ids"),
        ("stop", message.stop, MAX_STOPS, "strings"),
        ("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKENS, "ids"),
    ):
        if len(values) > limit:
            raise InvalidArgument(f"sampling.{field}", f"must be at most {limit} {kind}")


def decode_sampling(
    message: generation_pb.SamplingParams, random_seed: int, defaults: SamplingParams = GREEDY
) -> SamplingParams:
    """Sampling with `defaults` for missing parameters, and `random_seed` for a missing seed. Raises InvalidArgument."""
    _check_counts(message)
    names = (name for name in SamplingParams.__struct_fields__ if name not in ("seed", *_COLLECTIONS))
    given = {name: _WIRE_NAMES.get(name, name) for name in names}
    values = {name: getattr(message, wire) for name, wire in given.items() if message.HasField(wire)}
    sampling = replace(
        defaults,
        **values,
        seed=message.seed if message.HasField("seed") else random_seed,
        stop=tuple(message.stop),
        stop_tokens=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
    )
    sampling.check()
    return sampling
