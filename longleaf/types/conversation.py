"""Conversations, which the model's chat template converts to prompts."""

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]
MAX_MESSAGES = 512
"""Per conversation."""


class Message(msgspec.Struct, frozen=True):
    """One turn: its role and its text."""

    role: Role
    text: str


class Conversation(msgspec.Struct, frozen=True):
    """Messages in order; the last one is a user message."""

    messages: tuple[Message, ...]
