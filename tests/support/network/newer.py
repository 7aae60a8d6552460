"""A later version of the wire: every message has a field more, every enum a value, every oneof a member."""

import pkgutil
from importlib import import_module
from typing import Any

from google.protobuf import descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

import longleaf.v1

NEWER = "newer"
"""Name of every added field, and the suffix of the added member of every oneof."""
NUMBER = 1000
VALUE = 77
"""Number of the value added to every enum."""
_IMPORTED = (duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2)


class Newer:
    """Its messages by their short names, in a pool of their own: `newer.Delta(text="a", newer="b")`."""

    def __init__(self) -> None:
        self._pool = DescriptorPool()
        modules = (import_module(f"longleaf.v1.{found.name}") for found in pkgutil.iter_modules(longleaf.v1.__path__))
        own = [module.DESCRIPTOR for module in modules if module.__name__.endswith("_pb2")]
        waiting = [file for module in _IMPORTED for file in [module.DESCRIPTOR]] + own
        added: set[str] = set()
        while waiting:  # a file can be added when those that it imports are there
            file = next(one for one in waiting if {other.name for other in one.dependencies} <= added)
            proto = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
            if file in own:
                _grow(proto)
            self._pool.Add(proto)  # type: ignore[attr-defined]
            added.add(file.name)
            waiting.remove(file)

    def __getattr__(self, name: str) -> Any:
        return GetMessageClass(self._pool.FindMessageTypeByName(f"longleaf.v1.{name}"))


def _grow(file: descriptor_pb2.FileDescriptorProto) -> None:
    for message in file.message_type:
        if message.name.endswith("Entry"):
            continue
        real = [i for i, _ in enumerate(message.oneof_decl) if not _is_synthetic(message, i)]
        for i in real:
            _add(message, f"{message.oneof_decl[i].name}_{NEWER}", NUMBER + 1 + i).oneof_index = i
        _add(message, NEWER, NUMBER)
    for enum in file.enum_type:
        _add_value(enum)


def _is_synthetic(message: DescriptorProto, oneof: int) -> bool:
    """Whether it only marks an optional field."""
    return any(field.proto3_optional and field.oneof_index == oneof for field in message.field)


def _add(message: DescriptorProto, name: str, number: int) -> FieldDescriptorProto:
    label, kind = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.TYPE_STRING
    return message.field.add(name=name, number=number, label=label, type=kind)


def _add_value(enum: EnumDescriptorProto) -> None:
    unspecified = enum.value[0].name
    enum.value.add(name=unspecified.replace("UNSPECIFIED", NEWER.upper()), number=VALUE)
