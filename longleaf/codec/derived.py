"""Conversion of structs to protobuf messages and back, derived from the types of the fields and the descriptor.

A struct's field belongs to the message's field of the same name, or of the name that AIP gives it: `is_exact` is
`exact`, `prompt_tokens` is `prompt_token_count`, `queue_seconds` is `queue_duration`. Exceptions are arguments of
`derive`. A field without a partner, on either side, is an error at import.

Each direction is compiled to one expression, as dataclasses compiles its methods: it is as fast as a conversion written
by hand.
"""

from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from longleaf.codec.times import decode_seconds, encode_measured, encode_time

S = TypeVar("S", bound=msgspec.Struct)
V = TypeVar("V")
M = TypeVar("M", bound=Message)
Function = Callable[[Any], Any]


class Wire(NamedTuple):
    """The message's field for a field of a struct, and the conversion of its value, or of its items if repeated."""

    name: str
    encode: Function | None = None
    decode: Function | None = None


class _Derived(NamedTuple):
    """The conversion of one struct."""

    descriptor: Descriptor
    encoded: str
    """Expression that constructs the message from `value`."""
    constants: dict[str, Any]
    encode: Function
    decode: Function


_derived: dict[type, _Derived] = {}


def derive(
    struct: type[S], message: type[M], ignored: Iterable[str] = (), **names: str | Wire | None
) -> tuple[Callable[[S], M], Callable[[M], S]]:
    """Returns the functions that encode and decode `struct`. They do not validate.

    A field that is absent from the message is None, or has its default if it cannot be None. Unknown values of an enum
    are decoded to the first value of the field's Literal.

    Args:
        struct: A msgspec struct. Structs that it contains are derived first, if they have exceptions.
        message: The class of the message.
        ignored: Fields of the message that have no field in the struct.
        names: For each field of the struct whose name differs from the message's, that name; None if the message has no
            such field.

    Raises:
        TypeError: A field has no partner, or the struct was derived before with other arguments.
    """
    if struct in _derived:
        if names or _derived[struct].descriptor is not message.DESCRIPTOR:
            raise TypeError(f"{struct.__name__} is derived already; derive it before the structs that contain it")
        return _derived[struct].encode, _derived[struct].decode
    descriptor = cast(Descriptor, message.DESCRIPTOR)
    constants: dict[str, Any] = {"message_": message, "struct_": struct}
    encoded: list[str] = []
    decoded: list[str] = []
    unpaired, hints = set(descriptor.fields_by_name) - set(ignored), get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        given = names.pop(field.name, _wire_name(field.name, descriptor))
        if given is None:
            continue
        name = given.name if isinstance(given, Wire) else given
        if name not in unpaired:
            raise TypeError(f"{struct.__name__}.{field.name} has no partner in {descriptor.full_name}")
        unpaired.remove(name)
        wire = descriptor.fields_by_name[name]
        item, is_optional = _item_type(hints[field.name])
        _, encode, decode = given if isinstance(given, Wire) else _conversion(name, item, wire)
        absent = None if field.default is msgspec.NODEFAULT else field.default
        constants |= {f"encode_{name}": encode, f"decode_{name}": decode, f"absent_{name}": absent}
        encoded.append(f"{name}={_encoded(field.name, wire, encode, is_optional)}")
        decoded.append(f"{field.name}={_decoded(wire, decode, is_optional)}")
    if unpaired or names:
        raise TypeError(f"{struct.__name__} has no partner of {sorted(unpaired)}, or no fields {sorted(names)}")
    construction = f"message_({', '.join(encoded)})"
    encode = _compile("value", construction, constants)
    decode = _compile("message", f"struct_({', '.join(decoded)})", constants)
    _derived[struct] = _Derived(descriptor, construction, constants, encode, decode)
    return encode, decode


def derive_union(message: type[M], oneof: str, *kinds: type[V]) -> tuple[Callable[[V], M], Callable[[M], V | None]]:
    """Returns the functions that encode and decode a union. Each of `kinds`, derived structs or bytes, has a field in
    the oneof. A message with none of them, as a later version may send it, is decoded to None."""
    encoders: dict[type, Function] = {}
    decoders: dict[str | None, Function] = {}
    for kind in kinds:
        derived = _derived.get(kind)
        content = None if derived is None else derived.descriptor
        fields = message.DESCRIPTOR.oneofs_by_name[oneof].fields
        name = next(field.name for field in fields if field.message_type is content)
        encoded, constants = ("value", {}) if derived is None else (derived.encoded, derived.constants)
        decode = bytes if derived is None else derived.decode
        encoders[kind] = _compile("value", f"union_({name}={encoded})", {**constants, "union_": message})
        decoders[name] = _compile("message", f"decode_(message.{name})", {"decode_": decode})

    def encode(value: V) -> M:
        return encoders[type(value)](value)

    def decode_kind(found: M) -> V | None:
        decode = decoders.get(found.WhichOneof(oneof))
        return None if decode is None else decode(found)

    return encode, decode_kind


def _compile(argument: str, expression: str, constants: dict[str, Any]) -> Function:
    return eval(f"lambda {argument}: {expression}", dict(constants))


def _wire_name(name: str, wire: Descriptor) -> str:
    """The name that AIP gives to a field of a struct; the name itself if the message has none."""
    plain = name.removeprefix("is_").removeprefix("num_")
    count = plain.removesuffix("s") + "_count"
    units = plain.replace("seconds", "duration"), plain.replace("_bytes", "_size_bytes")
    candidates = (name, plain, count, plain + "_count", plain + "_token_count", plain + "_index", *units)
    return next((each for each in candidates if each in wire.fields_by_name), name)


def _item_type(hint: Any) -> tuple[Any, bool]:
    """The type of the values, or of the items of a tuple; and whether None is allowed."""
    is_optional = get_origin(hint) in (Union, UnionType)
    if is_optional:
        (hint,) = set(get_args(hint)) - {type(None)}
    if get_origin(hint) is tuple and get_args(hint)[1] is ...:
        hint = get_args(hint)[0]
    return hint, is_optional


def _conversion(name: str, item: Any, wire: FieldDescriptor) -> Wire:
    """The conversion of a value of this type; without functions for values that are the same on both sides."""
    if wire.enum_type is not None:
        return _enum(name, get_args(item), wire.enum_type)
    if get_origin(item) is Literal:
        return Wire(name, None, _Values({value: value for value in get_args(item)}).__getitem__)
    if wire.message_type is None or wire.message_type.GetOptions().map_entry:
        return Wire(name)
    if wire.message_type is Timestamp.DESCRIPTOR:
        return Wire(name, encode_time, decode_seconds)
    if wire.message_type is Duration.DESCRIPTOR:
        return Wire(name, encode_measured, decode_seconds)
    message = GetMessageClass(wire.message_type)
    if get_origin(item) is tuple:
        return _tuple(name, message)
    if item not in _derived:
        derive(item, message)
    return Wire(name, _derived[item].encode, _derived[item].decode)


def _tuple(name: str, message: type[Message]) -> Wire:
    """A tuple with a value for each field of the message."""
    names = [field.name for field in message.DESCRIPTOR.fields]

    def encode(values: tuple[Any, ...]) -> Message:
        return message(**dict(zip(names, values, strict=True)))

    def decode(found: Message) -> tuple[Any, ...]:
        return tuple(getattr(found, each) for each in names)

    return Wire(name, encode, decode)


class _Values(dict[Any, str]):
    """The values of a Literal by their numbers or texts; the first one for all others, which later versions have."""

    def __missing__(self, key: Any) -> str:
        return next(iter(self.values()))


def _enum(name: str, values: tuple[str, ...], enum: EnumDescriptor) -> Wire:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {value: enum.values_by_name[prefix + value.upper()].number for value in values}
    by_number = _Values({number: value for value, number in numbers.items()})
    return Wire(name, numbers.__getitem__, by_number.__getitem__)


def _encoded(field: str, wire: FieldDescriptor, encode: Function | None, is_optional: bool) -> str:
    """Expression of the message's field, for the struct `value`."""
    if encode is None:
        return f"value.{field}"
    if wire.is_repeated:
        return f"map(encode_{wire.name}, value.{field})"
    converted = f"encode_{wire.name}(value.{field})"
    return f"None if value.{field} is None else {converted}" if is_optional else converted


def _decoded(wire: FieldDescriptor, decode: Function | None, is_optional: bool) -> str:
    """Expression of the struct's field, for the message `message`."""
    found = f"message.{wire.name}"
    if wire.is_repeated:
        if wire.message_type is not None and wire.message_type.GetOptions().map_entry:
            return f"dict({found})"
        return f"tuple({found})" if decode is None else f"tuple(map(decode_{wire.name}, {found}))"
    converted = found if decode is None else f"decode_{wire.name}({found})"
    if is_optional or (wire.has_presence and wire.message_type is None):
        is_present = f"message.HasField({wire.name!r})" if wire.has_presence else found
        return f"{converted} if {is_present} else absent_{wire.name}"
    return converted
