"""Conversations as prompts: the chat template with its texts in it, in pieces that are encoded one after the other.

The ids are those of transformers' `apply_chat_template` for the same messages, with `sanitize_control_tokens`: without
control tokens in the texts, the ids of the whole rendered text. With a document, its place in the first question is
left open: the document's ids begin with what the template writes before it, and the rest follows it.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.text.control_tokens import ControlTokens, Marks, TemplatePiece
from coordinator.text.renderer import TemplateRenderer
from coordinator.text.template import Messages, Rendering
from longleaf.errors import InvalidArgument, ModelRefused

MAX_BYTES = 16 << 20
"""UTF-8 bytes of the texts of a conversation. Documents have no such limit."""


class Said(NamedTuple):
    """A message."""

    role: str
    text: str


class ConversationRefused(Exception):
    """The model's chat template cannot make a prompt of the messages; `message` is the index of the one to blame, if
    one is."""

    def __init__(self, reason: str, message: int | None) -> None:
        super().__init__(reason)
        self.message = message


class AroundDocument(NamedTuple):
    """A prompt with an open place for a document."""

    before: str
    after: str


class ChatTemplate:
    """The template of a model. For several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        renderer: TemplateRenderer,
        control: ControlTokens,
        separator: str,
    ) -> None:
        """`separator` is the text between a document and a question. Takes a while. Raises ModelRefused for a template
        that cannot show a single message of a user, and what the renderer raises."""
        self._source, self._special_tokens, self._renderer = source, special_tokens, renderer
        self._control = control
        self._separator = separator
        self._has_parts = False
        try:
            _, question = self._around_document([Said("user", "")], {}, "")
        except ConversationRefused as error:
            # templates of models that see images may know contents as lists of parts alone
            self._has_parts = True
            try:
                _, question = self._around_document([Said("user", "")], {}, "")
            except ConversationRefused:
                raise ModelRefused(str(error)) from error
        self.before_document = question.before
        """The text that comes before a document without a system message."""
        self._after_document = question.after

    def conversation(self, messages: Sequence[Said], variables: dict[str, Any]) -> list[TemplatePiece]:
        """The prompt of a conversation. `variables` are further names that the template can use. Raises
        ConversationRefused, InvalidArgument, and what the renderer raises."""
        marks = Marks.beside(output.text for output in messages)
        return self._control.split(self._render(messages, variables, marks, 0, ""), marks)

    def question(self, messages: Sequence[Said], variables: dict[str, Any]) -> list[TemplatePiece]:
        """What follows a document: the rest of a conversation that begins with it, where the first message is the
        question after it. Raises as `conversation`, also where the prompt would begin in another way than the document
        does."""
        marks, around = self._around_document(messages, variables, self._separator)
        if around.before != self.before_document:
            raise ConversationRefused("the chat template begins before it in another way than the context does", 0)
        return self._control.split(around.after, marks)

    def opening(self, system: str) -> list[TemplatePiece]:
        """What comes before a document with this system message. Raises as `conversation`, also where the template
        then ends a question in another way."""
        marks, around = self._around_document([Said("system", system), Said("user", "")], {}, "")
        if around.after != self._after_document:
            message = "it changes what the chat template writes after questions, which are asked without it"
            raise ConversationRefused(message, None)
        return self._control.split(around.before, marks)

    def _around_document(
        self, messages: Sequence[Said], variables: dict[str, Any], separator: str
    ) -> tuple[Marks, AroundDocument]:
        """With the document, and the separator, at the start of the first message of a user."""
        marks = Marks.beside(output.text for output in messages)
        number = next(i for i, output in enumerate(messages) if output.role == "user")
        parts = self._render(messages, variables, marks, number, marks.document + separator).split(marks.document)
        if len(parts) != 2:
            did = "leaves out" if len(parts) == 1 else "repeats"
            raise ConversationRefused(f"the chat template {did} the user's message", number)
        return marks, AroundDocument(*parts)

    def _render(
        self, messages: Sequence[Said], variables: dict[str, Any], marks: Marks, number: int, before: str
    ) -> str:
        """The prompt with marks; `before` comes before the text of message `number`."""
        size = sum(len(output.text.encode()) for output in messages)
        if size > MAX_BYTES:
            message = f"has {size:,} bytes of text, at most {MAX_BYTES:,}: ingest a long text as a context"
            raise InvalidArgument("conversation", message)
        texts = [self._control.mark(output.text, marks) for output in messages]
        edged = [self._control.mark_edges(text, marks) for text in texts]
        variants = [texts] if edged == texts else [texts, edged]
        found = self._ask([self._messages(messages, each, number, before) for each in variants], variables)
        for rendering in found:
            if rendering.reason:
                raise ConversationRefused(f"the chat template {rendering.reason}", rendering.message)
        self._check_system(messages, texts, found[0].text)
        # texts are only cut off from what surrounds them where they make a control token with it
        counts = [self._control.count(rendering.text) for rendering in found]
        return found[-1 if counts[0] != counts[-1] else 0].text

    @staticmethod
    def _check_system(messages: Sequence[Said], texts: Sequence[str], rendered: str) -> None:
        """A template may leave out what was said before; instructions that nobody reads are an error."""
        for number, (output, text) in enumerate(zip(messages, texts, strict=True)):
            shown = text.strip()
            forms = (shown, json.dumps(shown, ensure_ascii=False)[1:-1], json.dumps(shown)[1:-1])
            if output.role == "system" and not any(form in rendered for form in forms):
                raise ConversationRefused("the chat template leaves out the system's message", number)

    def _ask(self, conversations: Sequence[Messages], variables: dict[str, Any]) -> list[Rendering]:
        return self._renderer.render(self._source, {**self._special_tokens, **variables}, conversations)

    def _messages(self, messages: Sequence[Said], texts: Sequence[str], number: int, before: str) -> Messages:
        contents: list[Any] = [before + text if i == number else text for i, text in enumerate(texts)]
        if self._has_parts:
            contents = [[{"type": "text", "text": content}] for content in contents]
        return [{"role": output.role, "content": each} for output, each in zip(messages, contents, strict=True)]
