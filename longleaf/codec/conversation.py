"""Conversion of conversations."""

from typing import get_args

from longleaf.codec.names import check_utf8
from longleaf.errors import InvalidArgument
from longleaf.types import MAX_MESSAGES, Conversation, Message, Role
from longleaf.v1 import generation_pb2 as generation_pb

ROLES: tuple[Role, ...] = get_args(Role)
"""By their numbers, from 1."""


def encode_conversation(conversation: Conversation) -> generation_pb.Conversation:
    """Raises InvalidArgument naming the message with an unencodable text or an unknown role."""
    return generation_pb.Conversation(
        messages=[_encode_message(i, message) for i, message in enumerate(conversation.messages)]
    )


def _encode_message(place: int, message: Message) -> generation_pb.Message:
    field = f"conversation.messages[{place}]"
    if message.role not in ROLES:
        raise InvalidArgument(f"{field}.role", f"{message.role!r} is not one of {', '.join(ROLES)}")
    part = generation_pb.Part(text=check_utf8(message.text, f"{field}.text"))
    return generation_pb.Message(role=generation_pb.Role.Name(ROLES.index(message.role) + 1), parts=[part])


def decode_conversation(message: generation_pb.Conversation) -> Conversation:
    """Raises InvalidArgument naming the field."""
    num_messages = len(message.messages)
    if not 1 <= num_messages <= MAX_MESSAGES:
        text = f"has {num_messages:,} messages; allowed are 1 to {MAX_MESSAGES}"
        raise InvalidArgument("conversation.messages", text)
    messages = tuple(_decode_message(f"conversation.messages[{i}]", each) for i, each in enumerate(message.messages))
    if messages[-1].role != "user":
        text = f"has the role {messages[-1].role}; the last message must have the role user"
        raise InvalidArgument(f"conversation.messages[{num_messages - 1}].role", text)
    return Conversation(messages)


def _decode_message(field: str, message: generation_pb.Message) -> Message:
    if not 1 <= message.role <= len(ROLES):
        raise InvalidArgument(f"{field}.role", "is missing or not supported by this service")
    for i, part in enumerate(message.parts):
        if part.WhichOneof("kind") is None:
            raise InvalidArgument(
                f"{field}.parts[{i}]", "has a content type that this service does not support: give text"
            )
    role, text = ROLES[message.role - 1], "".join(part.text for part in message.parts)
    if role == "user" and not text:
        raise InvalidArgument(f"{field}.parts", "have no text")
    return Message(role, text)
