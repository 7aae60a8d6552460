"""Chat templates: conversations rendered to prompts, in pieces that are encoded one after the other.

The ids are those of transformers' `apply_chat_template` for the same messages, with `sanitize_control_tokens`: if the
texts contain no control tokens, they are the ids of the whole rendered text. With a document, its place in the first
question is left open: the document's ids begin with the text that the template writes before it, and the rest of the
prompt follows.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from coordinator.text.control_tokens import ControlTokens, Marks, TemplatePiece
from coordinator.text.renderer import TemplateRenderer
from coordinator.text.template import Messages, Rendering
from longleaf.errors import InvalidArgument, ModelRefused
from longleaf.types import Message, ToolCall
from longleaf.types.tools import parse_json

MAX_BYTES = 16 << 20
"""Maximum UTF-8 bytes of the texts of a conversation. Documents have no such limit."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates find the reasoning of a message."""
Tools = Sequence[dict[str, Any]]
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A value."}},
            "required": ["probe_key"],
        },
    },
}
PROBE_ARGUMENTS = '{"probe_key": "probe_value"}'


class ConversationRefused(Exception):
    """The chat template cannot render the messages; `message` is the index of the invalid one, if known."""

    def __init__(self, reason: str, message: int | None) -> None:
        super().__init__(reason)
        self.message = message


class AroundDocument(NamedTuple):
    """A prompt with an open place for a document."""

    before: str
    after: str


class CallForm(NamedTuple):
    """The form in which a template expects calls in earlier messages; the default is transformers' own."""

    has_objects: bool = True
    """Whether arguments are objects instead of JSON texts."""
    has_null_content: bool = False
    """Whether the content of a message with calls and without text is null."""


class ChatTemplate:
    """The chat template of a model. Thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        renderer: TemplateRenderer,
        control: ControlTokens,
        separator: str,
        tool_source: str | None = None,
    ) -> None:
        """`separator` is the text between a document and a question. `tool_source` is a separate template for requests
        with tools. Renders the template, which may be slow. Raises ModelRefused for a template that cannot render a
        single user message, and the errors of the renderer.
        """
        self._source, self._special_tokens, self._renderer = source, special_tokens, renderer
        self._tool_source = tool_source or source
        self._names = set(re.findall(r"\w+", source + self._tool_source))
        self._call_form = CallForm()
        self._control = control
        self._separator = separator
        self._has_parts = False
        try:
            _, question = self._around_document([Message("user", "")], {}, "")
        except ConversationRefused as error:
            # templates of multimodal models may accept contents only as lists of parts
            self._has_parts = True
            try:
                _, question = self._around_document([Message("user", "")], {}, "")
            except ConversationRefused:
                raise ModelRefused(str(error)) from error
        self.before_document = question.before
        """The text before a document without a system message."""
        self._after_document = question.after
        self.supports_tools = "tools" in self._names and self._probe_tools()
        """Whether the template describes tools to the model."""

    def uses(self, name: str) -> bool:
        """Whether the template may use the variable `name`."""
        return name in self._names

    def _probe_tools(self) -> bool:
        """Whether the template shows tools. Finds the form in which it shows calls."""
        forms = [CallForm(objects, null) for objects in (True, False) for null in (False, True)]
        call = ToolCall("probe0000", "probe_tool", PROBE_ARGUMENTS)
        question, result = Message("user", "probe"), Message("tool", "probe", tool_call_id=call.id)
        conversations = [self._messages([question], _unchanged, 0, "", CallForm())]
        turns = [question, Message("assistant", "", tool_calls=(call,)), result]
        conversations += [self._messages(turns, _unchanged, 0, "", form) for form in forms]
        first, *found = self._render_all(conversations, {}, [PROBE_TOOL])
        texts = [rendering.text for rendering in found]
        shown = (form for form, text in zip(forms, texts, strict=True) if _shows_call(text))
        self._call_form = next(shown, CallForm())
        return "probe_tool" in first.text

    def conversation(
        self, messages: Sequence[Message], variables: dict[str, Any], tools: Tools = ()
    ) -> list[TemplatePiece]:
        """Render a conversation. `variables` are further names that the template can use. Raises ConversationRefused,
        InvalidArgument, and the errors of the renderer.
        """
        marks = Marks.beside(_strings(messages, tools))
        return self._control.split(self._render(messages, variables, marks, 0, "", tools), marks)

    def question(
        self, messages: Sequence[Message], variables: dict[str, Any], tools: Tools = ()
    ) -> list[TemplatePiece]:
        """Return the part of the prompt after a document: the conversation begins with the document, and its first
        message is the question. Raises as `conversation`, also where the prompt begins differently from the document.
        """
        marks, around = self._around_document(messages, variables, self._separator, tools)
        if around.before != self.before_document and tools:
            message = "the chat template writes them before the document, which the context has begun without tools"
            raise InvalidArgument("tools", message)
        if around.before != self.before_document:
            raise ConversationRefused("the prompt before this message differs from that of the context", 0)
        return self._control.split(around.after, marks)

    def opening(self, system: str) -> list[TemplatePiece]:
        """Return the part of the prompt before a document, with this system message. Raises as `conversation`, also
        where the template then ends a question differently.
        """
        marks, around = self._around_document([Message("system", system), Message("user", "")], {}, "")
        if around.after != self._after_document:
            message = "it changes the prompt after a question, which is rendered without this message"
            raise ConversationRefused(message, None)
        return self._control.split(around.before, marks)

    def _around_document(
        self, messages: Sequence[Message], variables: dict[str, Any], separator: str, tools: Tools = ()
    ) -> tuple[Marks, AroundDocument]:
        """Render with the document, and the separator, at the start of the first user message."""
        marks = Marks.beside(_strings(messages, tools))
        number = next(i for i, output in enumerate(messages) if output.role == "user")
        rendered = self._render(messages, variables, marks, number, marks.document + separator, tools)
        parts = rendered.split(marks.document)
        if len(parts) != 2:
            did = "leaves out" if len(parts) == 1 else "repeats"
            raise ConversationRefused(f"the chat template {did} the user's message", number)
        return marks, AroundDocument(*parts)

    def _render(
        self,
        messages: Sequence[Message],
        variables: dict[str, Any],
        marks: Marks,
        number: int,
        before: str,
        tools: Tools = (),
    ) -> str:
        """Render the prompt with marks; `before` precedes the text of message `number`."""
        size = sum(len(text.encode()) for text in _strings(messages, tools))
        if size > MAX_BYTES:
            message = f"has {size:,} bytes of text; the limit is {MAX_BYTES:,}. Ingest a long text as a context"
            raise InvalidArgument("conversation", message)

        def mark(text: str) -> str:
            return self._control.mark(text, marks)

        def mark_edges(text: str) -> str:
            return self._control.mark_edges(mark(text), marks)

        texts = [mark(output.text) for output in messages]
        variants = [self._messages(messages, each, number, before, self._call_form) for each in (mark, mark_edges)]
        if variants[0] == variants[1]:
            del variants[1]
        marked_tools = [_mapped(tool, mark) for tool in tools]
        found = self._render_all(variants, variables, marked_tools)
        if marked_tools != [*tools] and any(_escaped(marks.start) in each.text.lower() for each in found):
            message = "the chat template escapes characters, so tools must not contain control tokens of the model"
            raise InvalidArgument("tools", message)
        for rendering in found:
            if rendering.reason:
                raise ConversationRefused(f"the chat template {rendering.reason}", rendering.message)
        self._check_system(messages, texts, found[0].text)
        # texts are separated from their surroundings only where they form a control token with them
        counts = [self._control.count(rendering.text) for rendering in found]
        return found[-1 if counts[0] != counts[-1] else 0].text

    @staticmethod
    def _check_system(messages: Sequence[Message], texts: Sequence[str], rendered: str) -> None:
        """A template may drop earlier messages; a dropped system message is an error."""
        for number, (output, text) in enumerate(zip(messages, texts, strict=True)):
            shown = text.strip()
            forms = (shown, json.dumps(shown, ensure_ascii=False)[1:-1], json.dumps(shown)[1:-1])
            if output.role == "system" and not any(form in rendered for form in forms):
                raise ConversationRefused("the chat template leaves out the system's message", number)

    def _render_all(
        self, conversations: Sequence[Messages], variables: dict[str, Any], tools: Tools = ()
    ) -> list[Rendering]:
        names = {**self._special_tokens, **variables, "tools": [*tools] if tools else None}
        return self._renderer.render(self._tool_source if tools else self._source, names, conversations)

    def _messages(
        self, messages: Sequence[Message], mark: Callable[[str], str], number: int, before: str, form: CallForm
    ) -> Messages:
        """The messages in transformers' form. `mark` is applied to all texts."""
        found, functions = list[dict[str, Any]](), dict[str, str]()
        for i, message in enumerate(messages):
            text = mark(message.text)
            content: Any = before + text if i == number else text
            if self._has_parts:
                content = [{"type": "text", "text": content}]
            fields: dict[str, Any] = {"role": message.role, "content": content}
            if message.tool_calls:
                functions |= {call.id: call.name for call in message.tool_calls}
                fields["tool_calls"] = [_call(call, mark, form) for call in message.tool_calls]
                if form.has_null_content and not message.text:
                    fields["content"] = None
            if message.tool_call_id:
                fields["tool_call_id"] = mark(message.tool_call_id)
                if message.tool_call_id in functions:
                    fields["name"] = functions[message.tool_call_id]
            if message.reasoning:
                names = [name for name in REASONING_NAMES if name in self._names]
                if message.tool_calls and message.text and names == ["thinking"]:
                    names = []  # the template of gpt-oss refuses both in a message with calls
                fields |= dict.fromkeys(names, mark(message.reasoning))
            found.append(fields)
        return found


def _call(call: ToolCall, mark: Callable[[str], str], form: CallForm) -> dict[str, Any]:
    arguments = _mapped(parse_json(call.arguments), mark) if form.has_objects else mark(call.arguments)
    return {"type": "function", "id": mark(call.id), "function": {"name": call.name, "arguments": arguments}}


def _shows_call(rendered: str) -> bool:
    """Whether the probe's call is shown, and its arguments are neither Python's form nor JSON within a string."""
    is_wrong = "'probe_key'" in rendered or '\\"probe_key' in rendered
    return "probe_value" in rendered and not is_wrong


def _unchanged(text: str) -> str:
    return text


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _mapped(value: Any, convert: Callable[[str], str]) -> Any:
    """A JSON value with all its strings converted, names included."""
    match value:
        case str():
            return convert(value)
        case dict():
            members = cast(dict[str, Any], value).items()
            return {convert(name): _mapped(each, convert) for name, each in members}
        case list():
            return [_mapped(each, convert) for each in cast(list[Any], value)]
        case _:
            return value


def _strings(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    """All texts of a request that a template may show."""
    for message in messages:
        yield message.text
        yield message.reasoning
        yield message.tool_call_id
        for call in message.tool_calls:
            yield from (call.id, call.arguments)
    found = list[str]()
    for tool in tools:
        _mapped(tool, lambda text: found.append(text) or text)
    yield from found
