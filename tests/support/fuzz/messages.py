"""Hypothesis strategies of messages, made from their descriptors: new fields and messages are covered by themselves."""

import math
import pkgutil
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from hypothesis import strategies as st

import longleaf.v1
from tests.support.parcels import packable

Path = tuple[FieldDescriptor, ...]
"""A field, and before it the fields that lead to it, all of them single messages."""

PINNED = "held"
"""Id of the context that exists whenever a request is made."""
ID = "one"
"""The id of a generation, an upload or any other named object."""
ARCHIVE = packable(vocabulary=200).packed()
BASES: dict[str, tuple[dict[str, Any], ...]] = {
    "GenerateRequest": (
        {"text": "who?", "sampling": {"max_token_count": 5}},
        {
            "context": f"contexts/{PINNED}",
            "token_ids": {"ids": [5, 6]},
            "sampling": {"temperature": 1, "seed": 7},
            "max_draft_token_count": 3,
        },
        {
            "text": "who?",
            "request_id": ID,
            "resume_duration": "1s",
            "sample_count": 2,
            "sampling": {"logprob_count": 2},
            "return_token_bytes": True,
        },
        {
            "context": f"contexts/{PINNED}",
            "text": "who?",
            "provenance": {"span_token_count": 32, "per_token": True, "ranking": 2, "confirm": True},
            "hidden": [{"token_start": "1", "token_end": "3"}],
        },
        {"request_id": ID, "resume_token_index": "0"},
    ),
    "CancelGenerationRequest": ({"request_id": ID},),
    "IngestContextRequest": ({"config": {"name": "contexts/new"}}, {"text": "Z3LDvMOfZQ=="}, {"text": "w7w="}),
    "UpdateContextRequest": (
        {"context": {"name": f"contexts/{PINNED}", "ttl": "3600s", "display_name": "x"}},
        {"context": {"name": f"contexts/{PINNED}", "pinned": True}, "update_mask": "pinned,expireTime"},
    ),
    "ForkContextRequest": ({"name": f"contexts/{PINNED}", "new_name": "contexts/new", "token_count": "7"},),
    "ExportContextRequest": ({"name": f"contexts/{PINNED}"},),
    "ImportContextRequest": (
        {"config": {"name": "contexts/new"}},
        {"piece": {"data": b64encode(ARCHIVE[:500]).decode()}},
        {"piece": {"offset": 500, "data": b64encode(ARCHIVE[500:]).decode()}},
    ),
    "GetContextRequest": ({"name": f"contexts/{PINNED}"},),
    "GetContextTextRequest": (
        {"name": f"contexts/{PINNED}", "token_range": {"start": "1", "end": "3"}},
        {"name": f"contexts/{PINNED}", "byte_range": {"end": "3"}},
    ),
    "RereadContextRequest": ({"name": f"contexts/{PINNED}"},),
    "CancelIngestRequest": ({"name": f"contexts/{PINNED}", "upload_id": "mine"},),
    "DeleteContextRequest": ({"name": f"contexts/{PINNED}"},),
    "CountTokensRequest": ({"text": "some text"},),
    "TokenizeRequest": ({"text": "some text", "return_spans": True},),
    "VerifyClusterRequest": ({"text": "some text", "max_token_count": 3}, {"seed": "5", "prompt_token_count": 20}),
    "DetokenizeRequest": ({"token_ids": {"ids": [5, 6, 260]}},),
}
"""Requests that are right, as JSON: changed in a field or two they come further than random ones. Those of a stream
follow one another. A message that is not here is changed from an empty one."""


def methods() -> list[MethodDescriptor]:
    """Every RPC of the package, by its full name."""
    modules = (import_module(f"longleaf.v1.{found.name}") for found in pkgutil.iter_modules(longleaf.v1.__path__))
    files = (module.DESCRIPTOR for module in modules if module.__name__.endswith("_pb2"))
    services = (service for file in files for service in file.services_by_name.values())
    return sorted((method for service in services for method in service.methods), key=lambda method: method.full_name)


def bases(descriptor: Descriptor) -> list[Message]:
    """Right requests of this kind, or an empty one."""
    kind = GetMessageClass(descriptor)
    return [json_format.ParseDict(fields, kind()) for fields in BASES.get(descriptor.name, ({},))]


def paths(descriptor: Descriptor, before: Path = ()) -> Iterator[Path]:
    """Every field of a message and its nested messages."""
    for field in descriptor.fields:
        path = (*before, field)
        yield path
        is_new = field.message_type not in [Struct.DESCRIPTOR, *(f.message_type for f in before)]
        if field.message_type and not field.is_repeated and is_new:
            yield from paths(field.message_type, path)


def with_value(message: Message, path: Path, value: Any) -> Message:
    """A copy of `message` in which the field at `path` is `value`."""
    changed = type(message)()
    changed.CopyFrom(message)
    owner: Any = changed
    for field in path[:-1]:
        owner = getattr(owner, field.name)
        owner.SetInParent()
    put(owner, path[-1], value)
    return changed


def put(message: Message, field: FieldDescriptor, value: Any) -> None:
    """Sets one field of any type."""
    message.ClearField(field.name)
    if is_map(field):
        entries = getattr(message, field.name)
        for key, item in value.items():
            if isinstance(item, Message):
                entries[key].CopyFrom(item)
            else:
                entries[key] = item
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type:
        getattr(message, field.name).CopyFrom(value)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, value)


def is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


# --- values ---

ODD_TEXTS = (
    *("", " ", "\0", "\n", "\x7f", "\u200b", "\ufeff", "\ufffd", "\U0010ffff", "e\u0301", "\u202eabc", "🦙" * 9),
    *(
        "contexts/",
        "contexts/A",
        "contexts/new",
        f"contexts/{PINNED}",
        "contexts/../etc",
        "new",
        PINNED,
        ID,
        "*",
        ".",
    ),
    *("<|end|>", "<|user|>", "%s%n{}{{}}", "../../etc/passwd", "a" * 1025, "世" * 500),
)
BYTES = (b"", b"\0", b"text", b"\xff\xfe", "世".encode()[:2], b"\xed\xa0\x80", b"x" * 5000)
SMALL = (0, 1, 2, 3, 31, 200, 260, 261, 1000, -1)
BITS = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63, FieldDescriptor.CPPTYPE_ENUM: 31}
UNSIGNED_BITS = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e-38, 1.0000001, 2.0, 100.0, 3e38, -3e38, math.inf, -math.inf, math.nan)
WIDE = (5e-324, 1e-310, 1e308, -1e308)


@cache
def names() -> tuple[str, ...]:
    """Field names of the package, for field masks and similar strings."""
    messages = {method.input_type for method in methods()} | {method.output_type for method in methods()}
    return tuple(sorted({field.name for message in messages for field in message.fields}))


def edges(field: FieldDescriptor) -> Sequence[Any]:
    """Boundary values of a scalar type, and values within its range."""
    kind = field.cpp_type
    if kind in BITS:
        return (*SMALL, -(2 ** BITS[kind]), 2 ** BITS[kind] - 1)
    if kind in UNSIGNED_BITS:
        return (*(value for value in SMALL if value >= 0), 2 ** UNSIGNED_BITS[kind] - 1)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return (False, True)
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        return FLOATS
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return (*FLOATS, *WIDE)
    return BYTES if field.type == FieldDescriptor.TYPE_BYTES else ODD_TEXTS


def edges_of(field: FieldDescriptor) -> Sequence[Any]:
    """As `edges`, also for fields that are not scalars: each boundary value once, many of one, and none."""
    if field.message_type is None:
        single: Sequence[Any] = edges(field)
    elif field.message_type == Struct.DESCRIPTOR:
        single = structs()
    elif is_map(field):
        return [{}, *({key: value} for key, value in _edge_entries(field.message_type))]
    else:
        kind = GetMessageClass(field.message_type)
        changed = (put_new(kind, inner, value) for inner in field.message_type.fields for value in edges_of(inner))
        single = [kind(), *changed]
    return [[], *([value] for value in single), list(single), [single[0]] * 1000] if field.is_repeated else single


def structs() -> Sequence[Struct]:
    """JSON objects: their messages contain each other, so that their edges have no end."""
    deep: Any = 1
    for _ in range(20):
        deep = [{"x": deep}]
    objects: list[dict[str, Any]] = [{}, *({name: 1} for name in ODD_TEXTS), {"messages": []}, {"x": deep}]
    objects += [{"x": value} for value in (None, True, *FLOATS, *WIDE, *ODD_TEXTS, [], {}, [None, "y"])]
    made = [Struct() for _ in objects]
    for struct, value in zip(made, objects, strict=True):
        struct.update(value)
    empty = Struct()
    empty.fields["x"].SetInParent()
    return [*made, empty]


def put_new(kind: type[Message], field: FieldDescriptor, value: Any) -> Message:
    message = kind()
    put(message, field, value)
    return message


def _edge_entries(entry: Descriptor) -> Iterator[tuple[Any, Any]]:
    key, value = (entry.fields_by_name[name] for name in ("key", "value"))
    yield from ((edge, edges_of(value)[1]) for edge in edges(key))
    yield from ((edges(key)[1], edge) for edge in edges_of(value))


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    known = st.sampled_from(edges(field))
    kind = field.cpp_type
    if kind in BITS:
        return known | st.integers(0, 300) | st.integers(-(2 ** BITS[kind]), 2 ** BITS[kind] - 1)
    if kind in UNSIGNED_BITS:
        return known | st.integers(0, 2 ** UNSIGNED_BITS[kind] - 1)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return known
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return known | st.floats(0, 2) | st.floats(width=32 if kind == FieldDescriptor.CPPTYPE_FLOAT else 64)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return known | st.binary(max_size=40)
    return known | st.sampled_from(names()) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Anything that the field can carry."""
    if is_map(field):
        assert field.message_type is not None
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_scalars(key), values(value), max_size=4)
    single = messages(field.message_type) if field.message_type else _scalars(field)
    return st.lists(single, max_size=5) if field.is_repeated else single


@cache
def messages(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    """Any message of this kind; of a oneof's fields the last one counts."""

    def build(fields: dict[str, Any]) -> Message:
        message = GetMessageClass(descriptor)()
        for name, value in fields.items():
            put(message, descriptor.fields_by_name[name], value)
        return message

    return st.deferred(
        lambda: st.fixed_dictionaries({}, optional={field.name: values(field) for field in descriptor.fields})
    ).map(build)


@st.composite
def changed(draw: st.DrawFn, message: Message) -> Message:
    """`message` with up to three fields changed."""
    described: Any = message.DESCRIPTOR
    places = list(paths(described))
    for path in draw(st.lists(st.sampled_from(places), max_size=3)) if places else ():
        message = with_value(message, path, draw(values(path[-1])))
    return message


def requests(method: MethodDescriptor) -> st.SearchStrategy[Message]:
    """One request of this RPC: a right one, a changed one, or any."""
    right = bases(method.input_type)
    return st.sampled_from(right).flatmap(changed) | messages(method.input_type)


@st.composite
def uploads(draw: st.DrawFn, method: MethodDescriptor) -> list[Message]:
    """A client's messages: one request, or for a streaming RPC several, also in a wrong order."""
    if not method.client_streaming:
        return [draw(requests(method))]
    right = bases(method.input_type)
    if draw(st.booleans()):
        return draw(st.lists(requests(method), max_size=4))
    sent = [draw(changed(message)) if draw(st.booleans()) else message for message in right]
    return draw(st.permutations(sent)) if draw(st.integers(0, 3)) == 0 else sent
