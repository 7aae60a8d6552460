"""Conversations, which the model's chat template converts to prompts."""

from typing import Literal

import msgspec

from longleaf.errors import InvalidArgument
from longleaf.types.tools import TOOL_NAME, TOOL_NAME_RULE, is_json_object

Role = Literal["system", "user", "assistant", "tool"]
MAX_MESSAGES = 512
"""Maximum number of messages per conversation."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool by the model."""

    id: str
    """Identifies the call, so that a result can name it."""
    name: str
    arguments: str
    """A JSON object, in valid JSON."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Role
    text: str
    reasoning: str = ""
    """Reasoning of an assistant message."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant message."""
    tool_call_id: str = ""
    """For a tool message: the id of the call."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages in order. The last one is from the user or a tool."""

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
        self._check_calls()
        if self.messages[-1].role != "tool":
            self._check_user(len(self.messages) - 1, "the last message")
        if has_context:
            self._check_user(self.first_turn, "the first message after the context")

    def _check_calls(self) -> None:
        known = set[str]()
        for i, message in enumerate(self.messages):
            field, is_assistant = f"conversation.messages[{i}]", message.role == "assistant"
            for name in ("reasoning", "tool_calls"):
                if getattr(message, name) and not is_assistant:
                    raise InvalidArgument(f"{field}.{name}", "only assistant messages may have it")
            for j, call in enumerate(message.tool_calls):
                if TOOL_NAME.fullmatch(call.name) is None:
                    raise InvalidArgument(f"{field}.tool_calls[{j}].name", TOOL_NAME_RULE)
                if not is_json_object(call.arguments):
                    raise InvalidArgument(f"{field}.tool_calls[{j}].arguments", "must be a JSON object")
                known.add(call.id)
            if (message.role == "tool") != bool(message.tool_call_id) or (
                message.role == "tool" and message.tool_call_id not in known
            ):
                raise InvalidArgument(
                    f"{field}.tool_call_id", "must be the id of an earlier tool call in a tool message"
                )

    def _check_user(self, i: int, place: str) -> None:
        if (role := self.messages[i].role) != "user":
            raise InvalidArgument(
                f"conversation.messages[{i}].role", f"has the role {role}; {place} must have the role user"
            )
