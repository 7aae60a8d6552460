"""Conversion of conversations."""

from typing import get_args

from longleaf.codec.derived import derive
from longleaf.codec.names import check_utf8
from longleaf.errors import InvalidArgument
from longleaf.types import Conversation, Message, Role, ToolCall
from longleaf.v1 import generation_pb2 as generation_pb

ROLES: tuple[Role, ...] = get_args(Role)
"""By their numbers, from 1."""
_encode_call, _decode_call = derive(ToolCall, generation_pb.ToolCall)


def encode_conversation(conversation: Conversation) -> generation_pb.Conversation:
    """Raises InvalidArgument for too many messages, and for an unencodable text or an unknown role."""
    conversation.check_length()  # before a large message is sent
    return generation_pb.Conversation(
        messages=[_encode_message(i, message) for i, message in enumerate(conversation.messages)]
    )


def _encode_message(place: int, message: Message) -> generation_pb.Message:
    field = f"conversation.messages[{place}]"
    if message.role not in ROLES:
        raise InvalidArgument(f"{field}.role", f"{message.role!r} is not one of {', '.join(ROLES)}")
    part = generation_pb.Part(text=check_utf8(message.text, f"{field}.text"))
    for j, call in enumerate(message.tool_calls):
        for name, value in (("id", call.id), ("name", call.name), ("arguments", call.arguments)):
            check_utf8(value, f"{field}.tool_calls[{j}].{name}")
    return generation_pb.Message(
        role=generation_pb.Role.Name(ROLES.index(message.role) + 1),
        parts=[part],
        reasoning=check_utf8(message.reasoning, f"{field}.reasoning"),
        tool_calls=map(_encode_call, message.tool_calls),
        tool_call_id=check_utf8(message.tool_call_id, f"{field}.tool_call_id"),
    )


def decode_conversation(message: generation_pb.Conversation, *, has_context: bool) -> Conversation:
    """Raises InvalidArgument naming the field. `has_context`: see Conversation.check."""
    conversation = Conversation(tuple(_decode_message(i, each) for i, each in enumerate(message.messages)))
    conversation.check(has_context=has_context)
    return conversation


def _decode_message(place: int, message: generation_pb.Message) -> Message:
    field = f"conversation.messages[{place}]"
    if not 1 <= message.role <= len(ROLES):
        raise InvalidArgument(f"{field}.role", "is missing or not supported by this service")
    for i, part in enumerate(message.parts):
        if part.WhichOneof("kind") is None:
            raise InvalidArgument(
                f"{field}.parts[{i}]", "has a content type that this service does not support: give text"
            )
    return Message(
        ROLES[message.role - 1],
        "".join(part.text for part in message.parts),
        message.reasoning,
        tuple(map(_decode_call, message.tool_calls)),
        message.tool_call_id,
    )
