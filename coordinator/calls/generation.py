"""A generation from its request to its last event: text to ids on the way in, ids to text on the way out."""

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from coordinator import events
from coordinator.calls.answer import Answer
from coordinator.calls.replay import CallLater, Replays, call_later
from coordinator.calls.text_limit import Capacity, TextLimit
from coordinator.text.encoder import Encoder
from coordinator.text.threads import TextThreads
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.vocabulary import check_known
from longleaf.errors import AlreadyExists, InvalidArgument, Unavailable
from longleaf.messages import Event, Finished, Generate, Resume


class EventStream(Protocol):
    """One request's events. Raises WorkerLost when the last rank is lost."""

    def __aiter__(self) -> AsyncIterator[events.Event]: ...

    async def aclose(self) -> None:
        """Ends the request, and returns at once when it has ended."""
        ...

    def cancel_sample(self, sample: int) -> None:
        """Ends one sample, whose Ended will not come. Idempotent."""
        ...


class Submitter(Capacity, Protocol):
    """The engine, as generations see it."""

    @property
    def is_exact(self) -> bool:
        """Whether answers are what the model alone would say."""
        ...

    def submit(self, prompt: events.Prompt) -> EventStream:
        """Raises InvalidArgument, NotFound, ResourceExhausted or Unavailable."""
        ...


def random_id() -> str:
    """An id for a generation that its caller did not name."""
    return secrets.token_hex(16)


class Generation:
    """Runs generations on an engine, and holds those that may be resumed. `clock` is the engine's, in seconds."""

    def __init__(
        self,
        engine: Submitter,
        tokenizer: Tokenizer,
        threads: TextThreads,
        clock: Callable[[], float] = time.monotonic,
        later: CallLater = call_later,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._threads = threads
        self._clock = clock
        self._replays = Replays(later)
        self._running: set[str] = set()
        """Ids of those that are not held, so that a repeated request does not run twice."""

    def run(self, request: Generate | Resume, seconds: float | None = None) -> AsyncGenerator[Event, None]:
        """Events of one generation, the last Finished. Closing the iterator ends the generation, unless it is held.

        The client waits `seconds`, if given. Raises, now or later, InvalidArgument, NotFound, AlreadyExists,
        ResourceExhausted, Unavailable or WorkerLost.
        """
        if isinstance(request, Resume):
            return self._replays.find(request.request_id).read(request.token_index)
        if (held := self._replays.get(request.request_id)) is not None:
            if not held.answers(request):
                raise InvalidArgument("request_id", f"{request.request_id} is the name of another request")
            return held.read()
        deadline = None if seconds is None else self._clock() + seconds + request.resume_seconds
        request_id = request.request_id or random_id()
        self._check_free(request_id)
        answer = self._events(request_id, request, deadline)
        if request.resume_seconds:
            return self._replays.hold(request_id, request, answer).read()
        return self._alone(request_id, answer)

    async def cancel(self, request_id: str) -> None:
        """Ends a generation that is held, and forgets it. Raises NotFound."""
        await self._replays.cancel(request_id)

    async def _events(self, request_id: str, request: Generate, deadline: float | None) -> AsyncGenerator[Event, None]:
        token_ids = await self._check(request)
        answer = self._answer(request_id, request)
        prompt = events.Prompt(
            context=request.context,
            token_ids=token_ids,
            sampling=request.sampling,
            end_tokens=self._tokenizer.end_tokens,
            num_samples=request.num_samples,
            claim=self._claim(request, deadline),
        )
        del request, token_ids  # the text may be large, and the answer long
        async with aclosing(self._engine.submit(prompt)) as stream:
            async for event in stream:
                for message in answer.take(event):
                    if isinstance(message, Finished) and message.reason == "stop":
                        stream.cancel_sample(message.sample)
                    yield message
                if answer.is_finished:
                    return
        raise Unavailable("the engine ended the stream before the answer's end")

    async def _alone(self, request_id: str, answer: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """The events of a generation that is not held. Raises AlreadyExists when another one of this id runs."""
        self._check_free(request_id)
        self._running.add(request_id)
        try:
            async with aclosing(answer):
                async for event in answer:
                    yield event
        finally:
            self._running.remove(request_id)

    def _check_free(self, request_id: str) -> None:
        if request_id in self._running:
            raise AlreadyExists(f"generations/{request_id}")

    @staticmethod
    def _claim(request: Generate, deadline: float | None) -> events.Claim:
        is_held = request.resume_seconds > 0
        return events.Claim(priority=request.priority, client=request.client, deadline=deadline, is_held=is_held)

    def _answer(self, request_id: str, request: Generate) -> Answer:
        tokenizer = self._tokenizer
        ends = tokenizer.end_tokens
        return Answer(request_id, request, tokenizer.alphabet, ends, self._clock, self._engine.is_exact)

    async def _check(self, request: Generate) -> Sequence[int]:
        """The prompt's ids. Raises InvalidArgument or NotFound."""
        held = self._engine.num_tokens(request.context) if request.context is not None else 0
        size = self._tokenizer.vocabulary_size
        if request.with_token_bytes and self._tokenizer.alphabet.spell is None:
            raise InvalidArgument("return_token_bytes", "the model's tokenizer makes text of its tokens together only")
        check_known(tuple(request.sampling.logit_bias), size, "sampling.logit_bias")
        check_known(request.sampling.stop_tokens, size, "sampling.stop_token_ids")
        if isinstance(request.input, str):
            return await self._text_ids(request, request.input, held)
        return await self._threads.run(check_ids, request.input, size)

    async def _text_ids(self, request: Generate, text: str, held: int) -> Sequence[int]:
        """Stops when more ids have come out than can fit after `held` tokens."""
        if not text:
            raise InvalidArgument("text", "the question is empty" if request.context else "the prompt is empty")
        limit = TextLimit(self._engine, self._tokenizer.max_bytes_per_token, held)
        limit.check("text", len(text.encode()))
        encoder = self._encoder(request)
        await self._threads.encode(encoder, text, lambda: limit.check_tokens("text", len(encoder.token_ids)))
        return await self._threads.run(check_ids, encoder.token_ids, self._tokenizer.vocabulary_size, "text")

    def _encoder(self, request: Generate) -> Encoder:
        if request.context is not None:
            return self._tokenizer.question_encoder()
        wanted, has_template = request.use_chat_template, self._tokenizer.has_chat_template
        if wanted and not has_template:
            raise InvalidArgument("use_chat_template", "the model has no chat template")
        return self._tokenizer.prompt_encoder(has_template if wanted is None else wanted)


def check_ids(token_ids: Sequence[int], vocabulary_size: int, field: str = "token_ids") -> Sequence[int]:
    """`token_ids`. Raises InvalidArgument when there is none, or one that is not in the vocabulary."""
    if not token_ids:
        raise InvalidArgument(field, "has no tokens" if field == "text" else "are empty")
    check_known(token_ids, vocabulary_size, field)
    return token_ids
