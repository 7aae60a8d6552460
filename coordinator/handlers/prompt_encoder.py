"""Encodes prompts: texts, conversations, and the opening of a document."""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from coordinator.handlers.size_limits import SizeLimit
from coordinator.text.chat_template import ConversationRefused, Tools
from coordinator.text.control_tokens import TemplatePiece
from coordinator.text.encoder import Encoder
from coordinator.text.template import num_characters
from coordinator.text.tokenizer import Opening, Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from coordinator.text.vocabulary import check_known
from longleaf.errors import InvalidArgument, StartError, Unavailable
from longleaf.types import Conversation, Generate, Message

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine

SYSTEM = "prefaced_config.system"
REASONING_EFFORT = "reasoning_effort"
EMPTY_LINE = "\n\n"
"""Separates a system message from the question that it is prepended to."""


class Prompts:
    """Encodes prompts in `threads`, in steps. A cancelled call stops between two steps."""

    def __init__(self, engine: "Engine", tokenizer: Tokenizer, threads: TokenizerPool) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._threads = threads

    async def ids_of(self, request: Generate) -> Sequence[int]:
        """The token ids of the prompt. Raises InvalidArgument, NotFound, or Unavailable during shutdown."""
        resident = self._engine.num_tokens(request.context) if request.context is not None else 0
        size = self._tokenizer.vocabulary_size
        if request.with_token_bytes and self._tokenizer.alphabet.spell is None:
            raise InvalidArgument("return_token_bytes", "the model's tokenizer makes text of its tokens together only")
        check_known(tuple(request.sampling.logit_bias), size, "sampling.logit_bias")
        check_known(request.sampling.stop_tokens, size, "sampling.stop_token_ids")
        if not isinstance(request.input, str | Conversation):
            return await self._threads.run(check_ids, request.input, size)
        if request.use_chat_template and request.context is None and not self._tokenizer.has_chat_template:
            raise InvalidArgument("use_chat_template", "the model has no chat template")
        self._check_template_names(request)
        limit = SizeLimit(self._engine, self._tokenizer.max_bytes_per_token, resident)
        if isinstance(request.input, Conversation):
            return await self._conversation_ids(request, request.input, limit)
        return await self._text_ids(request, request.input, limit)

    def _check_template_names(self, request: Generate) -> None:
        """Raises InvalidArgument for tools and reasoning effort that the chat template would leave out."""
        template = self._tokenizer.chat_template
        if request.tools and (template is None or not template.supports_tools):
            have = "the model has no chat template" if template is None else "the model's chat template has no tools"
            raise InvalidArgument("tools", f"are not supported: {have}")
        if REASONING_EFFORT in request.chat_template_kwargs and (
            template is None or not template.uses(REASONING_EFFORT)
        ):
            field = f"chat_template_kwargs.{REASONING_EFFORT}"
            raise InvalidArgument(field, "is not supported: the model's chat template does not use it")

    async def question_ids(self, text: str) -> Sequence[int]:
        """The token ids of a question after a document. Raises InvalidArgument, or Unavailable during shutdown."""
        pieces = await self._pieces([Message("user", text)], True, {}, "text", lambda _: "text")
        limit = SizeLimit(self._engine, self._tokenizer.max_bytes_per_token, 0)
        return await self._encode("text", await self._encoders(pieces, True), limit)

    async def _text_ids(self, request: Generate, text: str, limit: SizeLimit) -> Sequence[int]:
        if not text:
            raise InvalidArgument("text", "the question is empty" if request.context else "the prompt is empty")
        limit.check("text", len(text.encode()))
        has_context = request.context is not None
        if has_context or self._tokenizer.uses_template(request.use_chat_template):
            variables = request.chat_template_kwargs
            pieces = await self._pieces([Message("user", text)], has_context, variables, "text", lambda _: "text")
            return await self._encode("text", await self._encoders(pieces, has_context), limit)
        return await self._encode("text", self._tokenizer.prompt_encoders(text), limit)

    async def _conversation_ids(self, request: Generate, conversation: Conversation, limit: SizeLimit) -> Sequence[int]:
        has_context = request.context is not None
        limit.check("conversation", sum(len(message.text.encode()) for message in conversation.messages))
        messages, first = _lay_out(conversation, has_context, self._tokenizer.has_chat_template)
        if not has_context and not self._tokenizer.has_chat_template:
            return await self._encode("conversation", self._tokenizer.prompt_encoders(messages[0].text), limit)

        def field_of(message: int | None) -> str:
            return "conversation.messages" + ("" if message is None else f"[{first + message}]")

        variables = request.chat_template_kwargs
        pieces = await self._pieces(messages, has_context, variables, "conversation", field_of, request.tools)
        return await self._encode("conversation", await self._encoders(pieces, has_context), limit)

    async def opening(self, system: str, limit: SizeLimit) -> Opening:
        """The opening of a document with a system message. Raises InvalidArgument naming it if the template does
        not support one, or Unavailable during shutdown."""
        limit.check(SYSTEM, len(system.encode()))
        if (template := self._tokenizer.chat_template) is None:
            raise InvalidArgument(SYSTEM, "is not supported: the model has no chat template")
        try:
            pieces = await self._rendered(len(system), template.opening, system)
        except ConversationRefused as error:
            raise InvalidArgument(SYSTEM, f"cannot precede the document: {error}") from None
        stable, tail = await self._threads.run_long(len(system), self._tokenizer.cut_tail, pieces)
        token_ids = await self._encoded(SYSTEM, await self._encoders(stable, False), limit)
        limit.check_tokens(SYSTEM, len(token_ids))
        return Opening(tuple(token_ids), tail)

    async def _pieces(
        self,
        messages: Sequence[Message],
        has_context: bool,
        variables: dict[str, Any],
        field: str,
        field_of: Callable[[int | None], str],
        tools: Tools = (),
    ) -> list[TemplatePiece]:
        """The prompt of a conversation, or the part that follows a document. Raises InvalidArgument naming `field`, or
        the field that `field_of` returns for the refused message."""
        if (template := self._tokenizer.chat_template) is None:
            text = messages[0].text
            return await self._threads.run_long(len(text), self._tokenizer.plain_question, text)
        try:
            render = template.question if has_context else template.conversation
            size = sum(len(output.text) for output in messages) + num_characters(tools)
            return await self._rendered(size, render, messages, variables, tools)
        except ConversationRefused as error:
            raise InvalidArgument(field_of(error.message), str(error)) from None
        except InvalidArgument as error:
            raise InvalidArgument("tools" if error.field == "tools" else field, error.description) from None

    async def _encoders(self, pieces: Sequence[TemplatePiece], is_continued: bool) -> list[tuple[Encoder, str]]:
        """Runs in a thread, because a text may have many control tokens, each of which starts a new piece."""
        size = sum(len(piece.text) for piece in pieces)
        return await self._threads.run_long(size, self._tokenizer.encoders, pieces, is_continued=is_continued)

    async def _rendered(
        self, size: int, render: Callable[..., list[TemplatePiece]], *arguments: Any
    ) -> list[TemplatePiece]:
        """The pieces of texts with `size` characters. Raises ConversationRefused, InvalidArgument and Unavailable."""
        try:
            return await self._threads.run_long(size, render, *arguments)
        except (StartError, OSError) as error:
            raise Unavailable(f"cannot render the chat template: {error}") from error

    async def _encode(self, field: str, texts: Sequence[tuple[Encoder, str]], limit: SizeLimit) -> Sequence[int]:
        """Like `_encoded`, but raises InvalidArgument if there are no ids."""
        token_ids = await self._encoded(field, texts, limit)
        return await self._threads.run(check_ids, token_ids, self._tokenizer.vocabulary_size, field)

    async def _encoded(self, field: str, texts: Sequence[tuple[Encoder, str]], limit: SizeLimit) -> "array[int]":
        """The concatenated ids of all encoders. Stops once there are more than can fit."""
        encoders = [encoder for encoder, _ in texts]

        def check() -> None:
            limit.check_tokens(field, sum(len(encoder.token_ids) for encoder in encoders))

        await self._threads.encode_all(texts, check)
        token_ids = encoders[0].token_ids if encoders else array("I")
        for encoder in encoders[1:]:
            token_ids += encoder.token_ids
        return token_ids


def _lay_out(conversation: Conversation, has_context: bool, has_template: bool) -> tuple[list[Message], int]:
    """The messages to render, and the index of the first of them in the conversation. Leading system messages are
    prepended to the first question if they are not rendered separately: after a context, which has already begun, and
    for a model without a chat template."""
    messages = conversation.messages
    first = conversation.first_turn if has_context or not has_template else 0
    output = list(messages[first:])
    prefaces = [message.text for message in messages[:first] if message.text]
    output[0] = replace(output[0], text=EMPTY_LINE.join([*prefaces, output[0].text]))
    if not has_template and (len(output) > 1 or output[0].role != "user"):
        number = first + next((i for i, each in enumerate(output) if i or each.role != "user"), 0)
        text = "the model has no chat template, so a conversation is not supported: send one user message"
        raise InvalidArgument(f"conversation.messages[{number}]", text)
    return output, first


def check_ids(token_ids: Sequence[int], vocabulary_size: int, field: str = "token_ids") -> Sequence[int]:
    """Returns `token_ids`. Raises InvalidArgument if there are none, or if one is not in the vocabulary."""
    if not token_ids:
        raise InvalidArgument(field, "are empty" if field == "token_ids" else "has no tokens")
    check_known(token_ids, vocabulary_size, field)
    return token_ids
