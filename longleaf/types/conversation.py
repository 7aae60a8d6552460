"""Conversations, which the model's chat template converts to prompts."""

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]
MAX_MESSAGES = 512
"""Maximum number of messages per conversation."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Role
    text: str


class Conversation(msgspec.Struct, frozen=True):
    """Messages in order. The last one is a user message."""

    messages: tuple[Message, ...]
