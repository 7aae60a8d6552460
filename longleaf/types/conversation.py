"""Conversations, which the model's chat template converts to prompts."""

from typing import Literal

import msgspec

from longleaf.errors import InvalidArgument

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

    @property
    def first_turn(self) -> int:
        """Index of the first message that is not a system message."""
        roles = (message.role for message in self.messages)
        return next((i for i, role in enumerate(roles) if role != "system"), len(self.messages))

    def check_length(self) -> None:
        """Raises InvalidArgument unless a request can have this number of messages."""
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            text = f"has {len(self.messages):,} messages; allowed are 1 to {MAX_MESSAGES}"
            raise InvalidArgument("conversation.messages", text)

    def check(self, *, has_context: bool) -> None:
        """Raises InvalidArgument naming the field of a request in which the service does not accept the conversation.
        With `has_context`, it follows a context, which has begun already."""
        self.check_length()
        for i, message in enumerate(self.messages):
            if message.role == "user" and not message.text:
                raise InvalidArgument(f"conversation.messages[{i}].parts", "have no text")
        self._check_user(len(self.messages) - 1, "the last message")
        if has_context:
            self._check_user(self.first_turn, "the first message after the context")

    def _check_user(self, i: int, place: str) -> None:
        if (role := self.messages[i].role) != "user":
            raise InvalidArgument(
                f"conversation.messages[{i}].role", f"has the role {role}; {place} must have the role user"
            )
