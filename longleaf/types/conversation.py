"""Conversations, which the model's chat template makes prompts of."""

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]
MAX_MESSAGES = 512
"""Of one conversation."""


class Message(msgspec.Struct, frozen=True):
    """One turn: whose it is, and what was said."""

    role: Role
    text: str


class Conversation(msgspec.Struct, frozen=True):
    """Messages in their order; the last one is the user's."""

    messages: tuple[Message, ...]
