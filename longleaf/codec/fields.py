"""Inspection of encoded messages before they are parsed."""

from collections.abc import Mapping
from types import MappingProxyType

from google.protobuf.descriptor import Descriptor

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)
"""Wire types; groups are only a pair of tags around their fields."""
MAX_VARINT = 10
"""Bytes."""
NOTHING: Mapping[str, int] = MappingProxyType({})
_SIZES = {FIXED64: 8, FIXED32: 4, GROUP: 0, GROUP_END: 0}


def has_more_fields(data: bytes, descriptor: Descriptor, limit: int, apart: Mapping[str, int] = NOTHING) -> bool:
    """Whether an encoded message of this type has more than `limit` fields, including nested messages. Fields of
    messages named in `apart` are counted separately, with the limits given there.

    Stops at the first excess. A packed field counts once. Malformed data ends the count of its message, as it ends
    parsing.
    """
    left, waiting = {"": limit, **apart}, [(0, len(data), descriptor, "")]
    while waiting:
        at, end, kind, counted = waiting.pop()
        while at < end:
            tag, at = _varint(data, at)
            encoding, number, owner = tag & 7, tag >> 3, counted
            if encoding == VARINT:
                at = _varint(data, at)[1]
            elif encoding == BYTES:
                size, at = _varint(data, at)
                field = kind.fields_by_number.get(number)
                if field is not None and field.message_type is not None:
                    owner = field.message_type.name if field.message_type.name in apart else counted
                    waiting.append((at, min(at + size, end), field.message_type, owner))
                at += size
            else:
                at += _SIZES.get(encoding, end)
            left[owner] -= 1
            if left[owner] < 0:
                return True
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this position, and its end; an unterminated number extends to the end of the data."""
    value = 0
    for i, byte in enumerate(data[at : at + MAX_VARINT]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    return 0, len(data)
