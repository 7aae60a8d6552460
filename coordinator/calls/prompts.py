"""What is asked, as ids: texts, conversations, and what comes before a document."""

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.calls.text_limit import Capacity, TextLimit
from coordinator.text.encoder import Encoder
from coordinator.text.shapes import PREFACED, Parts, ShapeRefused
from coordinator.text.template import Shape
from coordinator.text.threads import TextThreads
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.vocabulary import check_known
from longleaf.errors import InvalidArgument
from longleaf.messages import Conversation, Generate

SYSTEM = "prefaced_config.system"
EMPTY_LINE = "\n\n"
"""Between a system's message and a question that it is put before."""


class _Asked(NamedTuple):
    """A conversation as the template is to see it."""

    texts: list[str]
    shape: Shape
    first: int
    """Number of the message whose role is the shape's first."""

    def field(self, number: int | None) -> str:
        """Where the message is of which this is the number in the shape."""
        return "conversation.messages" + (f"[{self.first + number}]" if number is not None else "")


class Prompts:
    """Makes ids in `threads`, in steps between which a cancelled call ends."""

    def __init__(self, capacity: Capacity, tokenizer: Tokenizer, threads: TextThreads) -> None:
        self._capacity = capacity
        self._tokenizer = tokenizer
        self._threads = threads

    async def ids_of(self, request: Generate) -> Sequence[int]:
        """Raises InvalidArgument, NotFound, or Unavailable at the end of the service."""
        held = self._capacity.num_tokens(request.context) if request.context is not None else 0
        size = self._tokenizer.vocabulary_size
        if request.with_token_bytes and self._tokenizer.alphabet.spell is None:
            raise InvalidArgument("return_token_bytes", "the model's tokenizer makes text of its tokens together only")
        check_known(tuple(request.sampling.logit_bias), size, "sampling.logit_bias")
        check_known(request.sampling.stop_tokens, size, "sampling.stop_token_ids")
        if not isinstance(request.input, str | Conversation):
            return await self._threads.run(check_ids, request.input, size)
        if request.use_chat_template and request.context is None and not self._tokenizer.has_chat_template:
            raise InvalidArgument("use_chat_template", "the model has no chat template")
        limit = TextLimit(self._capacity, self._tokenizer.max_bytes_per_token, held)
        if isinstance(request.input, Conversation):
            return await self._conversation_ids(request.input, request.context is not None, limit)
        return await self._text_ids(request, request.input, limit)

    async def _text_ids(self, request: Generate, text: str, limit: TextLimit) -> Sequence[int]:
        if not text:
            raise InvalidArgument("text", "the question is empty" if request.context else "the prompt is empty")
        limit.check("text", len(text.encode()))
        if request.context is not None:
            encoder = self._tokenizer.question_encoder()
        else:
            wanted, has_template = request.use_chat_template, self._tokenizer.has_chat_template
            encoder = self._tokenizer.prompt_encoder(has_template if wanted is None else wanted)
        return await self._encode("text", [encoder], [text], limit)

    async def _conversation_ids(self, conversation: Conversation, has_context: bool, limit: TextLimit) -> Sequence[int]:
        limit.check("conversation", sum(len(message.text.encode()) for message in conversation.messages))
        asked = _lay_out(conversation, has_context, self._tokenizer.has_chat_template)
        try:
            parts = await self._parts(asked.shape)
        except ShapeRefused as error:
            raise InvalidArgument(asked.field(error.message), str(error)) from None
        if has_context and parts[0] != self._tokenizer.shapes.question[0]:
            told = "the chat template begins before it in another way than the context does"
            raise InvalidArgument(asked.field(0), told)
        encoders = self._tokenizer.conversation_encoders(parts, has_context)
        return await self._encode("conversation", encoders, asked.texts, limit)

    async def opening(self, system: str, limit: TextLimit) -> Sequence[int]:
        """What a document begins with that has a system's message before it. Raises InvalidArgument naming it, when the
        template has no place for it, or Unavailable at the end of the service."""
        limit.check(SYSTEM, len(system.encode()))
        try:
            parts = await self._parts(PREFACED)
        except ShapeRefused as error:
            raise InvalidArgument(SYSTEM, f"cannot be put before the document: {error}") from None
        if parts[-1] != self._tokenizer.shapes.question[-1]:
            raise InvalidArgument(SYSTEM, "changes what the chat template puts behind questions, which come without it")
        encoders = self._tokenizer.conversation_encoders(parts[:-1], has_context=False)
        return await self._encode(SYSTEM, encoders, [system], limit)

    async def _parts(self, shape: Shape) -> Parts:
        """Raises ShapeRefused."""
        shapes = self._tokenizer.shapes
        return shapes.find(shape) or await self._threads.run_long(shapes.make, shape)

    async def _encode(
        self, field: str, encoders: list[Encoder], texts: Sequence[str], limit: TextLimit
    ) -> Sequence[int]:
        """The ids of all encoders, one after the other. Stops when more have come out than can fit."""

        def check() -> None:
            limit.check_tokens(field, sum(len(encoder.token_ids) for encoder in encoders))

        await self._threads.encode_all(zip(encoders, texts, strict=True), check)
        token_ids = encoders[0].token_ids
        for encoder in encoders[1:]:
            token_ids += encoder.token_ids
        return await self._threads.run(check_ids, token_ids, self._tokenizer.vocabulary_size, field)


def _lay_out(conversation: Conversation, has_context: bool, has_template: bool) -> _Asked:
    """Where the template does not see them, system's messages that come first are part of the first question: a context
    has begun already, and without a template there are only questions."""
    messages = conversation.messages
    first = 0
    if has_context or not has_template:
        first = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages) - 1)
    if has_context and messages[first].role != "user":
        told = f"is the {messages[first].role}'s, and the first after the context must be the user's"
        raise InvalidArgument(f"conversation.messages[{first}].role", told)
    texts = [message.text for message in messages[first:]]
    prefaces = [message.text for message in messages[:first] if message.text]
    texts[0] = EMPTY_LINE.join([*prefaces, texts[0]])
    return _Asked(texts, tuple(message.role for message in messages[first:]), first)


def check_ids(token_ids: Sequence[int], vocabulary_size: int, field: str = "token_ids") -> Sequence[int]:
    """`token_ids`. Raises InvalidArgument when there is none, or one that is not in the vocabulary."""
    if not token_ids:
        raise InvalidArgument(field, "are empty" if field == "token_ids" else "has no tokens")
    check_known(token_ids, vocabulary_size, field)
    return token_ids
