"""Chat templates: conversations rendered to prompts, in pieces that are encoded one after the other.

The ids are those of transformers' `apply_chat_template` for the same messages, with `sanitize_control_tokens`: if the
texts contain no control tokens, they are the ids of the whole rendered text. With a document, its place in the first
question is left open: the document's ids begin with the text that the template writes before it, and the rest of the
prompt follows.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.text.control_tokens import ControlTokens, Marks, TemplatePiece
from coordinator.text.renderer import TemplateRenderer
from coordinator.text.template import Messages, Rendering
from longleaf.errors import InvalidArgument, ModelRefused
from longleaf.types import Message

MAX_BYTES = 16 << 20
"""Maximum UTF-8 bytes of the texts of a conversation. Documents have no such limit."""


class ConversationRefused(Exception):
    """The chat template cannot render the messages; `message` is the index of the invalid one, if known."""

    def __init__(self, reason: str, message: int | None) -> None:
        super().__init__(reason)
        self.message = message


class AroundDocument(NamedTuple):
    """A prompt with an open place for a document."""

    before: str
    after: str


class ChatTemplate:
    """The chat template of a model. Thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        renderer: TemplateRenderer,
        control: ControlTokens,
        separator: str,
    ) -> None:
        """`separator` is the text between a document and a question. Renders the template, which may be slow. Raises
        ModelRefused for a template that cannot render a single user message, and the errors of the renderer.
        """
        self._source, self._special_tokens, self._renderer = source, special_tokens, renderer
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

    def conversation(self, messages: Sequence[Message], variables: dict[str, Any]) -> list[TemplatePiece]:
        """Render a conversation. `variables` are further names that the template can use. Raises ConversationRefused,
        InvalidArgument, and the errors of the renderer.
        """
        marks = Marks.beside(output.text for output in messages)
        return self._control.split(self._render(messages, variables, marks, 0, ""), marks)

    def question(self, messages: Sequence[Message], variables: dict[str, Any]) -> list[TemplatePiece]:
        """Return the part of the prompt after a document: the conversation begins with the document, and its first
        message is the question. Raises as `conversation`, also where the prompt begins differently from the document.
        """
        marks, around = self._around_document(messages, variables, self._separator)
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
        self, messages: Sequence[Message], variables: dict[str, Any], separator: str
    ) -> tuple[Marks, AroundDocument]:
        """Render with the document, and the separator, at the start of the first user message."""
        marks = Marks.beside(output.text for output in messages)
        number = next(i for i, output in enumerate(messages) if output.role == "user")
        parts = self._render(messages, variables, marks, number, marks.document + separator).split(marks.document)
        if len(parts) != 2:
            did = "leaves out" if len(parts) == 1 else "repeats"
            raise ConversationRefused(f"the chat template {did} the user's message", number)
        return marks, AroundDocument(*parts)

    def _render(
        self, messages: Sequence[Message], variables: dict[str, Any], marks: Marks, number: int, before: str
    ) -> str:
        """Render the prompt with marks; `before` precedes the text of message `number`."""
        size = sum(len(output.text.encode()) for output in messages)
        if size > MAX_BYTES:
            message = f"has {size:,} bytes of text; the limit is {MAX_BYTES:,}. Ingest a long text as a context"
            raise InvalidArgument("conversation", message)
        texts = [self._control.mark(output.text, marks) for output in messages]
        edged = [self._control.mark_edges(text, marks) for text in texts]
        variants = [texts] if edged == texts else [texts, edged]
        found = self._render_all([self._messages(messages, each, number, before) for each in variants], variables)
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

    def _render_all(self, conversations: Sequence[Messages], variables: dict[str, Any]) -> list[Rendering]:
        return self._renderer.render(self._source, {**self._special_tokens, **variables}, conversations)

    def _messages(self, messages: Sequence[Message], texts: Sequence[str], number: int, before: str) -> Messages:
        contents: list[Any] = [before + text if i == number else text for i, text in enumerate(texts)]
        if self._has_parts:
            contents = [[{"type": "text", "text": content}] for content in contents]
        return [{"role": output.role, "content": each} for output, each in zip(messages, contents, strict=True)]
