"""Conversion of resource names, texts, numbers and token ids."""

import operator
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from typing import TypeVar, cast

from longleaf.errors import InvalidArgument
from longleaf.formatting import human_number
from longleaf.types import CONTEXT_ID
from longleaf.v1 import generation_pb2 as generation_pb

Number = TypeVar("Number", int, float)
BytesLike = bytes | bytearray | memoryview
"""A text in UTF-8, never token ids."""
MAX_TOKEN_ID = 2**31 - 1
STEP_IDS = 1 << 16
"""Token ids converted per step."""
_CONTEXT_NAME = re.compile(rf"contexts/({CONTEXT_ID.pattern})")


def context_name(context: str) -> str:
    """Resource name of the context with this id; a full resource name is returned unchanged."""
    name = context if context.startswith("contexts/") else f"contexts/{context}"
    return check_utf8(name, "context")


def context_id(name: str, field: str = "name") -> str:
    """Id in the resource name `name`, the value of `field`. Raises InvalidArgument for an invalid name."""
    match = _CONTEXT_NAME.fullmatch(name)
    if match is None:
        shown = name.removeprefix("contexts/") if name.startswith("contexts/") else name
        shown = shown if len(shown) <= 100 else shown[:100] + "…"
        rule = "1 to 63 characters of a-z, 0-9, '.', '_' and '-', the first and the last a letter or digit"
        raise InvalidArgument(field, f"{shown!r} is not a valid context name: {rule}")
    return match[1]


def bare_context_id(name: str) -> str:
    """Id in the resource name `name`, which is not validated."""
    return name.removeprefix("contexts/")


def check_utf8(text: str, field: str) -> str:
    """Returns `text`. Raises InvalidArgument naming `field` for lone surrogates, which UTF-8 cannot represent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"is not Unicode text: lone surrogate at character {error.start}") from None
    return text


def check_range(field: str, value: Number, low: float, high: float, unit: str = "") -> Number:
    """Returns `value`. Raises InvalidArgument naming `field` unless it is between `low` and `high`, inclusive."""
    if not low <= value <= high:
        raise InvalidArgument(field, f"must be between {human_number(low)} and {human_number(high)}{unit}")
    return value


def to_text(value: str | BytesLike, field: str) -> str:
    """A text, or decoded UTF-8 bytes. Raises InvalidArgument naming `field` for other types."""
    match value:
        case str():
            return check_utf8(value, field)
        case bytes() | bytearray() | memoryview():
            try:
                return as_bytes(value, field).tobytes().decode()
            except UnicodeDecodeError as error:
                raise InvalidArgument(field, f"is not UTF-8 at byte {error.start}") from None
        case _:
            raise InvalidArgument(field, f"{type(value).__name__} is neither text nor UTF-8 bytes")


def as_bytes(value: BytesLike, field: str) -> memoryview:
    """The bytes, without copying. Raises InvalidArgument naming `field` for a view of larger items or several
    dimensions."""
    view = memoryview(value)
    if view.itemsize != 1 or view.ndim != 1:
        message = f"memoryview of shape {view.shape} with items of {view.itemsize} bytes is not text"
        raise InvalidArgument(field, message)
    return view


def is_sequence(value: object) -> bool:
    """Whether it is an ordered iterable and not a text: mappings and sets are not."""
    return isinstance(value, Iterable) and not isinstance(value, str | BytesLike | Mapping | AnySet)


def encode_ids(token_ids: Iterable[int]) -> generation_pb.TokenIds:
    """Raises InvalidArgument for anything but a sequence of ids, naming the first invalid one."""
    if not is_sequence(token_ids):
        raise InvalidArgument("token_ids", f"{type(token_ids).__name__} is not a sequence of token ids")
    given = token_ids if isinstance(token_ids, Sequence) else list(token_ids)
    try:
        return generation_pb.TokenIds(ids=given)
    except (ValueError, TypeError) as error:
        place = next((i for i, token_id in enumerate(given) if not _is_id(token_id)), None)
        if place is None:
            raise InvalidArgument("token_ids", str(error)) from None
        wrong = given[place]
        message = str(wrong) if type(wrong) is int else type(wrong).__name__
        raise InvalidArgument(f"token_ids.ids[{place}]", f"{message} is not a token id") from None


def _is_id(value: object) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= operator.index(cast(int, value)) <= MAX_TOKEN_ID
    except TypeError:
        return False


def decode_ids(message: generation_pb.TokenIds, max_ids: int | None = None) -> "array[int]":
    """The ids as 32-bit numbers, converted in steps, between which other threads can run.

    Raises InvalidArgument for more than `max_ids`, and naming the first negative one.
    """
    if max_ids is not None and len(message.ids) > max_ids:
        raise InvalidArgument("token_ids", f"has {len(message.ids):,} ids; the limit is {max_ids:,}")
    token_ids = array("I")
    try:
        for start in range(0, len(message.ids), STEP_IDS):
            token_ids.extend(message.ids[start : start + STEP_IDS])
    except OverflowError:
        place = next(i for i, token_id in enumerate(message.ids) if token_id < 0)
        raise InvalidArgument(f"token_ids.ids[{place}]", f"{message.ids[place]} is negative") from None
    return token_ids
