"""Conversion of input items to messages of a conversation."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from gateway.bodies import converted, used_fields
from gateway.errors import HttpProblem, unsupported
from longleaf.types import Message, ToolCall

IGNORED = frozenset(("status", "phase", "caller", "namespace", "prompt_cache_breakpoint", "annotations", "logprobs"))
"""Fields of items that do not change the conversation."""


class MessageItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str = ""


class CallItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a function."""

    call_id: str
    name: str
    type: Literal["function_call"]
    arguments: str = ""
    id: str = ""


class ResultItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a call."""

    call_id: str
    output: str | list[dict[str, Any]]
    type: Literal["function_call_output"]
    id: str = ""
    name: str = ""


class ReasoningItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning of an earlier answer. Encrypted reasoning of another server is left out."""

    type: Literal["reasoning"]
    id: str = ""
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] = []
    encrypted_content: str = ""


Item = MessageItem | CallItem | ResultItem | ReasoningItem
KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


class ConvertedItem(NamedTuple):
    """A message, and the field of the request that it begins with."""

    message: Message
    name: str


def messages_of(given: str | Sequence[object]) -> list[ConvertedItem]:
    """The messages of an input. Adjacent items of the assistant are one message, as they were one answer. Raises
    HttpProblem that names the field."""
    if isinstance(given, str):
        return [ConvertedItem(Message("user", given), "input")]
    found, answer = list[ConvertedItem](), list[Item]()
    for i, raw in enumerate(given):
        name = f"input[{i}]"
        item = _item(raw, name)
        if isinstance(item, CallItem | ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant"):
            answer.append(item)
            continue
        if answer:
            found.append(_answer(answer, i))
            answer = []
        found.append(ConvertedItem(_message(item, name), name))
    if answer:
        found.append(_answer(answer, len(given)))
    return found


def _item(raw: object, path: str) -> Item:
    if not isinstance(raw, dict):
        raise HttpProblem(400, f"{path}: is not an object", param=path, code="invalid_type")
    given = cast(dict[str, Any], raw)
    kind = given.get("type") or ("message" if "role" in given else None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise unsupported(f"{path}.type", f"must be {', '.join(KINDS)}")
    struct = KINDS[kind]
    return converted(used_fields(given, struct, IGNORED) | {"type": kind}, cast(type[MessageItem], struct), path)


def _message(item: Item, path: str) -> Message:
    """The message of an item that is not of the assistant."""
    if isinstance(item, ResultItem):
        return Message("tool", text_of(item.output, f"{path}.output"), tool_call_id=item.call_id)
    assert isinstance(item, MessageItem)
    role = "user" if item.role == "user" else "system"
    return Message(role, text_of(item.content, f"{path}.content"))


def _answer(items: list[Item], end: int) -> ConvertedItem:
    """One answer of the assistant, which ends before the item with the index `end`."""
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    first = end - len(items)
    for i, item in enumerate(items, first):
        match item:
            case MessageItem():
                texts.append(text_of(item.content, f"input[{i}].content"))
            case ReasoningItem():
                thoughts += [text_of(part, f"input[{i}]") for part in (item.content or item.summary,)]
            case CallItem():
                calls.append(ToolCall(item.call_id, item.name, item.arguments or "{}"))
            case _:
                pass
    message = Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))
    return ConvertedItem(message, f"input[{first}]")


def text_of(content: str | list[dict[str, Any]], path: str) -> str:
    """The text of a content with parts of text only. Raises HttpProblem that names the field."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            raise unsupported(f"{path}[{i}].type", "only text is supported")
        field = "refusal" if kind == "refusal" else "text"
        text = part.get(field)
        if not isinstance(text, str):
            param = f"{path}[{i}].{field}"
            raise HttpProblem(400, f"{param}: is not a string", param=param, code="invalid_type")
        texts.append(text)
    return "".join(texts)
