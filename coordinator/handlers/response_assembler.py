"""Converts engine events of one request to client events: ids become text, and stop strings end it."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from blake3 import blake3

from coordinator import engine_messages
from coordinator.handlers.attribution_tracing import AttributionTracer
from coordinator.text.answer_parser import AnswerParser, Piece, ReasoningPiece, TextPiece
from coordinator.text.detokenizer import Alphabet, TextStream
from coordinator.text.token_bytes import TokenByteDecoder
from coordinator.text.tool_calls import Call
from longleaf.rank_protocol.step import Attention
from longleaf.sampling import Token
from longleaf.types import (
    Attribution,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generate,
    Progress,
    Recovering,
    Started,
    Timings,
    ToolCall,
    Usage,
)

CALL_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
CALL_ID_LENGTH = 9


def no_parser() -> AnswerParser | None:
    """The answer is not split."""
    return None


class RequestTimes:
    """Times at which a request arrived and started, in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.arrived = clock()
        self.started: float | None = None


class ResponseAssembler:
    """Assembles all samples of one request. `end_tokens` end a sample unless its sampling ignores them."""

    def __init__(
        self,
        request_id: str,
        request: Generate,
        alphabet: Alphabet,
        end_tokens: frozenset[int],
        clock: Callable[[], float],
        exactness_note: str,
        tracing: AttributionTracer | None = None,
        before: Sequence[int] = (),
        dequantization: str = "",
        make_parser: Callable[[], AnswerParser | None] = no_parser,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """`before` are the prompt ids that the text of the answer continues, from `detokenizer.ids_before`.
        `make_parser` returns a parser for each sample whose answer is split; the alphabet must show its markers.
        `warnings` are those of Started. If logprobs include the bytes of tokens, the alphabet must support `spell`. The
        request, whose text may be large, is not kept. `exactness_note` is the reason for which the answer is not exact;
        empty if it is. `dequantization` describes quantized weights."""
        sampling = request.sampling
        self._request_id = request_id
        self._exactness_note = exactness_note
        self._dequantization = dequantization
        self._warnings = warnings
        self._times = RequestTimes(clock)
        ends = frozenset(sampling.stop_tokens) | (frozenset[int]() if sampling.ignore_end_token else end_tokens)
        spell = alphabet.spell if request.with_token_bytes else None
        self._samples = [
            SampleAssembler(
                sample,
                TextStream(alphabet, sampling.stop, before),
                ends,
                self._times,
                exactness_note,
                dequantization,
                TokenByteDecoder(spell, alphabet.silent, ends, is_continued=bool(before)) if spell else None,
                tracing,
                AnswerSplitter(parser, f"{request_id}/{sample}", is_single=request.single_tool_call)
                if (parser := make_parser()) is not None
                else None,
            )
            for sample in range(request.num_samples)
        ]

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.is_finished for sample in self._samples)

    @property
    def open_samples(self) -> list[int]:
        """Numbers of the samples that have not ended."""
        return [number for number, sample in enumerate(self._samples) if not sample.is_finished]

    def assemble(self, event: engine_messages.Event) -> list[Event]:
        """Returns the client's events for `event`. Events of a sample after its end are dropped."""
        match event:
            case engine_messages.Admitted():
                if event.queue_position == 0 and self._times.started is None:
                    self._times.started = self._times.clock()
                for sample in self._samples:
                    sample.usage = Usage(event.prompt_tokens, event.cached_tokens)
                return [
                    Started(
                        prompt_tokens=event.prompt_tokens,
                        cached_tokens=event.cached_tokens,
                        queue_position=event.queue_position,
                        request_id=self._request_id,
                        is_beyond_trained=event.is_beyond_trained,
                        is_exact=not self._exactness_note,
                        exactness_note=self._exactness_note,
                        dequantization=self._dequantization,
                        warnings=self._warnings,
                    )
                ]
            case Progress() | Recovering():
                return [event]
            case engine_messages.Tokens() | engine_messages.Ended() if self._samples[event.sample].is_finished:
                return []
            case engine_messages.Tokens():
                return self._samples[event.sample].assemble(event)
            case engine_messages.Ended():
                return self._samples[event.sample].finish(event)


class AnswerSplitter:
    """Splits the text of one sample with a parser. Tokens are withheld together with their text."""

    def __init__(self, parser: AnswerParser, sample_id: str, *, is_single: bool) -> None:
        """`is_single`: the answer ends after its first tool call. Ids of calls are derived from `sample_id`, so that a
        replay gives the same ones."""
        self._parser, self._sample_id, self._is_single = parser, sample_id, is_single
        self._num_withheld = self._num_calls = 0
        self._pieces: list[Piece] = []
        self.num_reasoning = 0
        """Tokens of the reasoning so far."""
        self.is_complete = False
        """Whether the answer ends here, because it has its only call."""

    def push(self, num_ids: int, text: str) -> int:
        """Adds the text of the next tokens. Returns the number of tokens that are released."""
        was_reasoning = self._parser.is_reasoning
        self._pieces += self._parser.push(text)
        self._num_withheld += num_ids
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning += num_ids
        if self._is_single and (call := next((each for each in self._pieces if isinstance(each, Call)), None)):
            del self._pieces[self._pieces.index(call) + 1 :]
            self.is_complete = True
        return self._release() if self.is_complete or self._parser.is_decided else 0

    def finish(self, num_ids: int, text: str) -> int:
        """As `push`, for the last text."""
        num_released = self.push(num_ids, text)
        if not self.is_complete:
            self._pieces += self._parser.finish()
        return num_released + self._release()

    def pop_pieces(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The text, the reasoning and the calls of the released tokens."""
        text = "".join(piece.text for piece in self._pieces if isinstance(piece, TextPiece))
        reasoning = "".join(piece.text for piece in self._pieces if isinstance(piece, ReasoningPiece))
        calls = tuple([self._identified(piece) for piece in self._pieces if isinstance(piece, Call)])
        self._pieces = []
        return text, reasoning, calls

    def _release(self) -> int:
        num_released, self._num_withheld = self._num_withheld, 0
        return num_released

    def _identified(self, call: Call) -> ToolCall:
        self._num_calls += 1
        number = int.from_bytes(blake3(f"{self._sample_id}/{self._num_calls}".encode()).digest(length=8))
        return ToolCall(_call_id(number), call.name, call.arguments)


def _call_id(number: int) -> str:
    """9 letters and digits, because the templates of Mistral's models accept no other ids."""
    characters = list[str]()
    for _ in range(CALL_ID_LENGTH):
        number, digit = divmod(number, len(CALL_ID_ALPHABET))
        characters.append(CALL_ID_ALPHABET[digit])
    return "".join(characters)


class SampleAssembler:
    """One answer: its text, the tokens whose text is pending, and its end."""

    def __init__(
        self,
        index: int,
        text: TextStream,
        end_tokens: frozenset[int],
        times: RequestTimes,
        exactness_note: str,
        dequantization: str,
        byte_decoder: TokenByteDecoder | None,
        tracing: AttributionTracer | None,
        splitter: AnswerSplitter | None,
    ) -> None:
        self._index = index
        self._splitter = splitter
        self._tracing = tracing
        self._attention: list[Attention | None] = []
        """Attention of the tokens whose text is pending, if attribution is requested."""
        self._text = text
        self._end_tokens = end_tokens
        self._times = times
        self._exactness_note = exactness_note
        self._dequantization = dequantization
        self._byte_decoder = byte_decoder
        self._first_token_at: float | None = None
        self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._next_index = 0
        """Index of the first of `_tokens` in the answer."""
        self._tokens: list[Token] = []
        """Tokens whose text is pending."""
        self._has_end_token = False
        self.usage = Usage()
        """Tokens of the prompt. Those of the answer are counted as they arrive."""
        self.is_finished = False

    def assemble(self, event: engine_messages.Tokens) -> list[Event]:
        if self._first_token_at is None:
            self._first_token_at = self._times.clock()
        self._tokens += map(self._byte_decoder.decode, event.tokens) if self._byte_decoder else event.tokens
        if self._tracing is not None:
            self._attention += event.attention or [None] * len(event.tokens)
        num_before, (num_released, text) = self._num_tokens, self._push(event.tokens)
        self._num_drafted += event.num_drafted
        # accepted tokens come first in their step; tokens after a stop string are not part of the answer
        num_reported = self._num_tokens - num_before
        num_steps_reported = bisect_right(event.step_ends, num_reported)
        self._num_accepted += min(event.num_accepted, num_reported - num_steps_reported)
        return [*self._delta(num_released, text), *([self._stop()] if self._is_stopped else [])]

    @property
    def _is_stopped(self) -> bool:
        """Whether a stop string or a single call has ended the answer."""
        return bool(self._text.matched_stop) or (self._splitter is not None and self._splitter.is_complete)

    def _push(self, tokens: Sequence[Token]) -> tuple[int, str]:
        """The number of tokens that are released, and their text, up to the token that ends the answer."""
        num_released, text = 0, ""
        for token in tokens:
            self._num_tokens += 1
            if token.id in self._end_tokens:
                self._has_end_token = True  # its text, if any, is not part of the answer
                break
            num_ids, piece = self._text.push(token.id)
            if self._splitter is not None:
                split = self._splitter.finish if self._text.matched_stop else self._splitter.push
                num_ids, piece = split(num_ids, piece), ""
            num_released += num_ids
            text += piece
            if self._is_stopped:
                break
        return num_released, text

    def finish(self, event: engine_messages.Ended) -> list[Event]:
        num_ids, text = self._text.finish(int(self._has_end_token))
        if self._splitter is not None:
            num_ids, text = self._splitter.finish(num_ids, text), ""
        delta = self._delta(num_ids, text)
        if self._is_stopped:
            return [*delta, self._stop()]
        self.is_finished = True
        timings = timings_of(event.queue_seconds, event.first_token_seconds, event.decode_seconds)
        usage = self._usage_of(event.prompt_tokens, event.cached_tokens, event.completion_tokens)
        return [*delta, self._finished(event.reason, "", usage, timings)]

    def _stop(self) -> Finished:
        """Ends the sample at a stop string. The engine has not ended it, so the times are measured here."""
        self.is_finished = True
        now, times = self._times.clock(), self._times
        first = now if self._first_token_at is None else self._first_token_at
        started = first if times.started is None else times.started
        usage = self._usage_of(self.usage.prompt_tokens, self.usage.cached_tokens, self._num_tokens)
        timings = timings_of(started - times.arrived, first - times.arrived, now - first)
        return self._finished("stop", self._text.matched_stop, usage, timings)

    def _finished(self, reason: FinishReason, matched_stop: str, usage: Usage, timings: Timings) -> Finished:
        note, dequantization = self._exactness_note, self._dequantization
        return Finished(
            reason,
            matched_stop,
            usage,
            timings,
            self._index,
            not note,
            exactness_note=note,
            dequantization=dequantization,
        )

    def _usage_of(self, num_prompt: int, num_cached: int, num_generated: int) -> Usage:
        num_reasoning = 0 if self._splitter is None else self._splitter.num_reasoning
        return Usage(num_prompt, num_cached, num_generated, self._num_drafted, self._num_accepted, num_reasoning)

    def _delta(self, count: int, text: str) -> list[Event]:
        """A delta of the first `count` pending tokens; empty if there are none."""
        if not count:
            return []
        index, self._next_index = self._next_index, self._next_index + count
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        token_ids = tuple([token.id for token in tokens])
        logprobs = tuple([token.logprobs for token in tokens if token.logprobs is not None])
        reasoning, calls = "", ()
        if self._splitter is not None:
            text, reasoning, calls = self._splitter.pop_pieces()
        return [Delta(index, token_ids, text, logprobs, self._index, self._trace(token_ids), reasoning, calls)]

    def _trace(self, token_ids: tuple[int, ...]) -> Attribution | None:
        """Adds the tokens of a delta to the totals; returns their sources, if requested per token."""
        if (tracing := self._tracing) is None:
            return None
        count = len(token_ids)
        attention, self._attention = self._attention[:count], self._attention[count:]
        tracing.reported(self._index).add(token_ids, attention)
        return tracing.of_delta([each for each in attention if each is not None])


def timings_of(queue: float, first_token: float, decode: float) -> Timings:
    """Seconds as the engine counts them: queue and first token from arrival, decode from the first token."""
    return Timings(queue, first_token, decode, max(0.0, first_token - queue))
