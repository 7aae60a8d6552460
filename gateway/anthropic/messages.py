"""Conversion of Anthropic's messages, which consist of blocks, to messages of a conversation."""

import json
from typing import Any, Literal, cast

import msgspec

from gateway.bodies import converted, used_fields
from gateway.errors import HttpProblem, unsupported
from longleaf.types import Message, ToolCall

SEPARATOR = "\n\n"
"""Between text blocks of the user and the system. Text blocks of an answer are one text that calls interrupt."""
ERROR = "Error: "
"""Precedes the result of a tool that failed, since chat templates have no field for it."""


class AnthropicMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
KINDS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks for each role."""
IGNORED = frozenset(("cache_control", "citations", "caller"))
"""Fields of blocks that change no answer: all prompts are cached, and citations and callers come from other servers."""


class ChatTurns:
    """The messages of a conversation, and the field of the request that each belongs to."""

    def __init__(self) -> None:
        self.messages = list[Message]()
        self.names = list[str]()

    def add(self, message: Message, name: str) -> None:
        self.messages.append(message)
        self.names.append(name)

    def add_message(self, message: AnthropicMessage, name: str) -> None:
        """Adds a message of the request. Raises HttpProblem that names the field."""
        blocks = _blocks(message, f"{name}.content")
        if message.role == "assistant":
            self.add(_answer(blocks), name)
            return
        texts = list[str]()
        for i, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                self._add_text(message.role, texts, name)
                text = text_of(block.content, f"{name}.content[{i}].content")
                text = f"{ERROR}{text}" if block.is_error else text
                self.add(Message("tool", text, tool_call_id=block.tool_use_id), name)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
        self._add_text(message.role, texts, name)

    def _add_text(self, role: Literal["user", "system"], texts: list[str], name: str) -> None:
        if texts:
            self.add(Message(role, SEPARATOR.join(texts)), name)
            texts.clear()


def text_of(content: str | list[dict[str, Any]], path: str) -> str:
    """The text of a content that may have text blocks only. Raises HttpProblem that names the field."""
    if isinstance(content, str):
        return content
    blocks = [_block(block, ("text",), f"{path}[{i}]") for i, block in enumerate(content)]
    return SEPARATOR.join(block.text for block in blocks if isinstance(block, TextBlock))


def _blocks(message: AnthropicMessage, path: str) -> list[Block]:
    """Raises HttpProblem that names the field."""
    if isinstance(message.content, str):
        return [TextBlock("text", message.content)]
    if not message.content:
        raise HttpProblem(400, f"{path}: give at least one block", param=path, code="invalid_value")
    return [_block(block, ALLOWED[message.role], f"{path}[{i}]") for i, block in enumerate(message.content)]


def _block(given: dict[str, Any], allowed: tuple[str, ...], path: str) -> Block:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in allowed:
        raise unsupported(f"{path}.type", f"must be {' or '.join(allowed)}")
    struct = KINDS[kind]
    return converted(used_fields(given, struct, IGNORED), cast(type[TextBlock], struct), path)


def _answer(blocks: list[Block]) -> Message:
    """An earlier answer."""
    calls = [
        ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        "assistant",
        "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
        tuple(calls),
    )
