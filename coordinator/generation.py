"""A generation from its request to its last event: text to ids on the way in, ids to text on the way out."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from coordinator import events
from coordinator.text import Piece, TextStream
from coordinator.text_limit import Capacity, TextLimit
from coordinator.tokenizer import Tokenizer
from coordinator.wire import finished_of
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.messages import Delta, Event, Finished, Generate, Progress, Started, Timings, Usage


class EventStream(Protocol):
    """One job's events. Raises WorkerLost when a rank is lost."""

    def __aiter__(self) -> AsyncIterator[events.Event]: ...

    async def aclose(self) -> None:
        """Ends the job, and returns at once when it has ended."""
        ...


class Submitter(Capacity, Protocol):
    """The engine, as generations see it."""

    def submit(self, prompt: events.Prompt) -> EventStream:
        """Raises InvalidArgument, NotFound, ResourceExhausted or Unavailable."""
        ...


class Generation:
    """Runs generations on an engine. `clock` counts seconds."""

    def __init__(self, engine: Submitter, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock

    async def run(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Events of one generation, the last Finished. Closing the iterator ends the generation.

        Raises InvalidArgument, NotFound, ResourceExhausted, Unavailable or WorkerLost.
        """
        answer = _Answer(self._tokenizer, request, self._clock)
        self._check_size(request)
        token_ids = await asyncio.to_thread(self._prompt_ids, request)
        prompt = events.Prompt(
            context=request.context,
            token_ids=tuple(token_ids),
            sampling=request.sampling,
            end_tokens=self._tokenizer.end_tokens,
        )
        async with aclosing(self._engine.submit(prompt)) as stream:
            async for event in stream:
                for message in answer.take(event):
                    yield message
                if answer.is_finished:
                    return
        raise Unavailable("the engine ended the stream before the answer's end")

    def _check_size(self, request: Generate) -> None:
        """Raises InvalidArgument for a text that cannot fit, and NotFound for a context that is not there."""
        held = self._engine.get_context(request.context).tokens if request.context is not None else 0
        if isinstance(request.input, str):
            limit = TextLimit(self._engine, self._tokenizer.max_bytes_per_token, held)
            limit.check("text", len(request.input.encode()))

    def _prompt_ids(self, request: Generate) -> Sequence[int]:
        if not isinstance(request.input, str):
            return check_ids(request.input, self._tokenizer.vocabulary_size)
        if not request.input:
            raise InvalidArgument("text", "the question is empty" if request.context else "the prompt is empty")
        return check_ids(self._text_ids(request, request.input), self._tokenizer.vocabulary_size, "text")

    def _text_ids(self, request: Generate, text: str) -> Sequence[int]:
        if request.context is not None:
            return self._tokenizer.question_ids(text)
        wanted, has_template = request.use_chat_template, self._tokenizer.has_chat_template
        if wanted and not has_template:
            raise InvalidArgument("use_chat_template", "the model has no chat template")
        return self._tokenizer.prompt_ids(text, has_template if wanted is None else wanted)


def check_ids(token_ids: Sequence[int], vocabulary_size: int, field: str = "token_ids") -> Sequence[int]:
    """`token_ids`. Raises InvalidArgument when there is none, or one that is not in the vocabulary.

    Ids of a text are checked as well: some tokenizers have added tokens for which the model has no embedding.
    """
    if not token_ids:
        raise InvalidArgument(field, "has no tokens" if field == "text" else "are empty")
    wrong = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocabulary_size), None)
    if wrong is not None:
        place = field if field == "text" else f"{field}.ids[{wrong}]"
        raise InvalidArgument(place, f"{token_ids[wrong]} is not in the vocabulary of {vocabulary_size} tokens")
    return token_ids


class _Answer:
    """Turns the engine's events into the client's, and ends the answer at a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Generate, clock: Callable[[], float]) -> None:
        self._text = TextStream(tokenizer.alphabet, request.sampling.stop)
        self._end_tokens = frozenset[int]() if request.sampling.ignore_end_token else tokenizer.end_tokens
        self._clock = clock
        self._arrived = self._started_at = clock()
        self._first_token_at: float | None = None
        self._usage = Usage()
        self._num_tokens = 0
        self._end_ids: tuple[int, ...] = ()
        self.is_finished = False

    def take(self, event: events.Event) -> list[Event]:
        match event:
            case events.Started(prompt_tokens, cached_tokens):
                self._started_at = self._clock()
                self._usage = Usage(prompt_tokens, cached_tokens)
                return [Started(prompt_tokens, cached_tokens)]
            case events.Progress(processed, total):
                return [Progress(processed, total)]
            case events.Tokens():
                return self._take_tokens(event)
            case events.Ended():
                return self._finish(event)

    def _take_tokens(self, event: events.Tokens) -> list[Event]:
        if self._first_token_at is None:
            self._first_token_at = self._clock()
        pieces: list[Piece] = []
        for token_id in event.token_ids:
            self._num_tokens += 1
            if token_id in self._end_tokens:
                self._end_ids = (token_id,)  # its text, if it has any, is not part of the answer
                break
            if (piece := self._text.push(token_id)) is not None:
                pieces.append(piece)
            if self._text.matched_stop:
                return [*_delta(pieces), self._stop()]
        return [*_delta(pieces)]

    def _finish(self, event: events.Ended) -> list[Event]:
        piece = self._text.finish(*self._end_ids)
        delta = _delta([piece] if piece else [])
        if self._text.matched_stop:
            return [*delta, self._stop()]
        self.is_finished = True
        return [*delta, finished_of(event)]

    def _stop(self) -> Finished:
        """The end that the engine does not know of: its stream is closed here, so the times are taken here too."""
        self.is_finished = True
        now = self._clock()
        first = now if self._first_token_at is None else self._first_token_at
        usage = Usage(self._usage.prompt_tokens, self._usage.cached_tokens, self._num_tokens)
        timings = Timings(self._started_at - self._arrived, first - self._arrived, now - first)
        return Finished("stop", self._text.matched_stop, usage, timings)


def _delta(pieces: list[Piece]) -> list[Event]:
    """The pieces of one event as one delta; none when there is none."""
    if not pieces:
        return []
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return [Delta(pieces[0].index, token_ids, "".join(piece.text for piece in pieces))]
