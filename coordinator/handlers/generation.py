"""Runs generations from the request to the last event: encodes the prompt, and decodes the generated tokens."""

import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from coordinator import engine_messages
from coordinator.auth.caller import CALLER, OWNER
from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.grammars.compiler import GrammarCompiler
from coordinator.handlers.answer_grammars import AnswerGrammars
from coordinator.handlers.attribution_baseline import NEUTRAL_QUESTION, Baselines
from coordinator.handlers.attribution_tracing import AttributionTracer, TextMaps, no_text, submit_patiently
from coordinator.handlers.journal_replay import replay_journal
from coordinator.handlers.prompt_encoder import Prompts
from coordinator.handlers.response_assembler import ResponseAssembler, no_parser
from coordinator.handlers.resumable_generations import ResumableGenerations, request_digest
from coordinator.handlers.resumable_sessions import CallLater, call_later
from coordinator.persistence.journal.entries import GenerationEntry
from coordinator.persistence.journal.journal import Journal, JournalWriter
from coordinator.telemetry.observers import CURRENT, NO_OBSERVERS, EventSink, Observers
from coordinator.text.answer_formats import tool_parameters
from coordinator.text.answer_parser import AnswerParser, answer_parser
from coordinator.text.detokenizer import ids_before
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import AlreadyExists, InvalidArgument, LongleafError, StorageUnavailable, Unavailable
from longleaf.sampling import MAX_TOKENS
from longleaf.tenants import scoped
from longleaf.types import Event, Finished, Generate, Resume

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine
    from coordinator.engine.stream import Stream

HIDDEN = "tokens of the context are hidden"
"""A reason for which an answer is not exact."""
UNKNOWN_FORMAT = "tool calls remain text: the format in which the model writes them is unknown"
"""A warning."""


def random_id() -> str:
    """A generation id for a request that has none."""
    return secrets.token_hex(16)


class Generation:
    """Runs generations on an engine, and holds those that can be resumed. With a journal, held generations survive a
    restart of the service. `clock` is the engine's, in seconds; `wall_clock` returns seconds since the Unix epoch."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        threads: TokenizerPool,
        clock: Callable[[], float] = time.monotonic,
        later: CallLater = call_later,
        journal: Journal | None = None,
        wall_clock: Callable[[], float] = time.time,
        observers: Observers = NO_OBSERVERS,
        quotas: QuotaEnforcer = UNLIMITED,
        tenant_share: float = 1.0,
        text_maps: TextMaps = no_text,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._engine = engine
        self._text_maps = text_maps
        compiler = grammars or GrammarCompiler(tokenizer.checkpoint.folder)
        self._grammars = AnswerGrammars(tokenizer, compiler, threads)
        self._tokenizer = tokenizer
        self._threads = threads
        self._clock = clock
        self._wall_clock = wall_clock
        self._prompts = Prompts(engine, tokenizer, threads)
        self._baselines = Baselines(lambda: self._prompts.question_ids(NEUTRAL_QUESTION))
        self._journal = journal
        self._observers = observers
        self._quotas = quotas
        self._resumable = ResumableGenerations(later, self._forget, tenant_share=tenant_share)
        self._running: set[str] = set()
        """Ids of generations that are not held, so that a repeated request does not run twice."""

    def run(self, request: Generate | Resume, seconds: float | None = None) -> AsyncGenerator[Event, None]:
        """Yields the events of one generation; the last one is Finished. Closing the iterator ends the generation,
        unless it is held.

        `seconds`, if given, is the time for which the client waits. Raises, immediately or while iterating,
        InvalidArgument, NotFound, AlreadyExists, ResourceExhausted, Unavailable, RankLost or StorageUnavailable.
        """
        if isinstance(request, Resume):
            _record_request_id(request.request_id)
            return self._resumable.find(request.request_id).read(request.token_index)
        request_id = request.request_id or scoped(request.tenant, random_id())
        _record_request_id(request_id)
        if (resident := self._resumable.get(request.request_id)) is not None:
            if not resident.matches(request):
                raise InvalidArgument("request_id", f"{request.request_id} is in use by another request")
            return resident.read()
        deadline = None if seconds is None else self._clock() + seconds + request.resume_seconds
        self._check_free(request_id)
        answer = self._events(request_id, request, deadline)
        return self._resumable.register(request_id, request, answer).read() if request.resume_seconds else answer

    async def cancel(self, request_id: str) -> None:
        """Ends a held generation and removes it. Raises NotFound."""
        await self._resumable.cancel(request_id)

    def _forget(self, request_id: str) -> None:
        if self._journal is not None:
            with suppress(StorageUnavailable):  # then the next service process holds it until it expires
                self._journal.remove(request_id)

    async def resume_all(self) -> None:
        """Restores the generations that earlier service processes held; their `resume_seconds` start now. A generation
        continues after its last token when a client reads it. Raises StorageUnavailable."""
        for resident, output in self._journal.load() if self._journal is not None else ():
            request, request_id = resident.request, resident.request_id
            tracing = self._make_tracer(request)
            answer = self._make_assembler(request_id, request, tracing, resident.token_ids)
            past_events, generated = await self._threads.run(
                replay_journal, output, self._prompt(request, resident.token_ids), answer
            )
            continued = self._resume(resident, answer, tracing, generated)
            self._resumable.restore(request_id, request, resident.question, continued, past_events)

    async def _events(self, request_id: str, request: Generate, deadline: float | None) -> AsyncGenerator[Event, None]:
        with nullcontext() if request.resume_seconds else self._run_unregistered(request_id):
            tracing = self._make_tracer(request)
            self._quotas.check_generation()  # before the work that a long prompt causes
            grammar = await self._grammars.check(request)
            token_ids = await self._prompts.ids_of(request)
            grammar = grammar or await self._grammars.grammar_of(request, token_ids)
            if request.until_full:
                request = self._with_longest_answer(request, len(token_ids))
            answer = self._make_assembler(request_id, request, tracing, token_ids)
            prompt = self._prompt(request, token_ids, deadline, grammar)
            if tracing is not None:
                prompt = tracing.begin(self._engine, prompt, self._text_maps, self._quotas.charge_input)
            with self._observers.observe_generation(request_id, request.tenant) as emit:
                with self._quotas.begin_generation(len(token_ids)):
                    begun = self._engine.submit(prompt)
                async with aclosing(begun) as stream:
                    with self._begin_record(request_id, request, token_ids, deadline) as record:
                        if request.context is not None:
                            emit = _charge_cached_input(emit, len(token_ids), self._quotas.charge_input)
                        del request, token_ids, prompt  # they may be large, and the answer may take long
                        async with aclosing(self._client_events(stream, record, answer, tracing, emit)) as events:
                            async for message in events:
                                yield message

    async def _resume(
        self,
        entry: GenerationEntry,
        answer: ResponseAssembler,
        tracing: AttributionTracer | None,
        generated: Mapping[int, Sequence[int]],
    ) -> AsyncGenerator[Event, None]:
        """The remaining events of a generation that an earlier service process started."""
        if answer.is_finished:
            return
        assert self._journal is not None
        deadline = None if entry.deadline is None else self._clock() + entry.deadline - self._wall_clock()
        grammar = await self._grammars.grammar_of(entry.request, entry.token_ids)
        prompt = self._prompt(entry.request, entry.token_ids, deadline, grammar)
        if any(generated.values()) or len(generated) < prompt.num_samples:
            prompt = msgspec.structs.replace(prompt, generated=generated)
        if tracing is not None:
            prompt = tracing.begin(self._engine, prompt, self._text_maps, self._quotas.charge_input)
        with self._observers.observe_generation(entry.request_id, entry.request.tenant) as emit:
            async with aclosing(await submit_patiently(self._engine, prompt)) as stream:
                with self._journal.reopen(entry.request_id) as record:
                    del entry, prompt, generated
                    async with aclosing(self._client_events(stream, record, answer, tracing, emit)) as events:
                        async for message in events:
                            yield message

    async def _client_events(
        self,
        stream: "Stream",
        record: JournalWriter | None,
        answer: ResponseAssembler,
        tracing: AttributionTracer | None,
        emit: EventSink,
    ) -> AsyncGenerator[Event, None]:
        """Yields the client's events; each is written to the journal first."""
        async for event in stream:
            if record is not None:
                record.append(event)
            emit(event)
            for message in answer.assemble(event):
                if isinstance(message, Finished) and message.reason == "stop":
                    stream.cancel_sample(message.sample)
                if isinstance(message, Finished) and tracing is not None:
                    message = await tracing.finished(message)
                yield message
            if answer.is_finished:
                return
        raise Unavailable("the engine ended the stream before the answer's end")

    def _begin_record(
        self, request_id: str, request: Generate, token_ids: Sequence[int], deadline: float | None
    ) -> AbstractContextManager[JournalWriter | None]:
        """The journal record of a held generation. Raises StorageUnavailable."""
        if self._journal is None or not request.resume_seconds:
            return nullcontext()
        resident = GenerationEntry(
            request_id=request_id,
            request=msgspec.structs.replace(request, input=""),
            question=request_digest(request),
            prompt=array("I", token_ids).tobytes(),
            deadline=None if deadline is None else self._wall_clock() + deadline - self._clock(),
        )
        return self._journal.begin(resident)

    @contextmanager
    def _run_unregistered(self, request_id: str) -> Generator[None, None, None]:
        """Records that a generation runs that is not held. Raises AlreadyExists if another one with this id is
        running."""
        self._check_free(request_id)
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.remove(request_id)

    def _with_longest_answer(self, request: Generate, num_tokens: int) -> Generate:
        """The request with the longest answer that fits. If none fits, admission reports the reason."""
        is_whole = _is_whole(request)
        room = self._engine.answer_room(request.context, num_tokens, request.num_samples, is_whole=is_whole)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=max(1, min(MAX_TOKENS, room)))
        return msgspec.structs.replace(request, sampling=sampling)

    def _check_free(self, request_id: str) -> None:
        if request_id in self._running:
            raise AlreadyExists(f"generations/{request_id}")

    def _prompt(
        self, request: Generate, token_ids: Sequence[int], deadline: float | None = None, grammar: str = ""
    ) -> engine_messages.Prompt:
        is_resident, most = request.resume_seconds > 0, self._engine.max_draft_tokens
        tenant, client, caller = request.tenant, request.client, CALLER.get(OWNER)
        scheduling = engine_messages.SchedulingParams(
            priority=request.priority,
            tenant=tenant,
            client=client,
            max_concurrent=caller.quotas.generations,
            is_alone=caller.is_alone,
            deadline=deadline,
            is_resumable=is_resident,
        )
        return engine_messages.Prompt(
            context=request.context,
            token_ids=token_ids,
            sampling=request.sampling,
            end_tokens=self._tokenizer.end_tokens,
            num_samples=request.num_samples,
            scheduling=scheduling,
            hidden=request.hidden,
            max_draft_tokens=most if request.max_draft_tokens is None else min(most, request.max_draft_tokens),
            grammar=grammar,
        )

    def _make_tracer(self, request: Generate) -> AttributionTracer | None:
        """Raises InvalidArgument."""
        if request.provenance is None:
            return None
        return AttributionTracer(request, request.provenance, self._baselines)

    def _make_assembler(
        self, request_id: str, request: Generate, tracing: AttributionTracer | None, token_ids: Sequence[int]
    ) -> ResponseAssembler:
        is_continued = request.context is None and not self._tokenizer.uses_template(request.use_chat_template)
        before = ids_before(self._tokenizer.alphabet, token_ids) if is_continued else ()
        alphabet, ends = self._tokenizer.alphabet, self._tokenizer.end_tokens
        make_parser, warnings = no_parser, ()
        if request.parse_answer:
            make_parser = self._parsers(request, token_ids)
            if make_parser() is not None:
                alphabet = self._tokenizer.parsing_alphabet
            if request.tools and not self._tokenizer.answer_format.call_format:
                warnings = (UNKNOWN_FORMAT,)
        scaling = ""
        with suppress(LongleafError):  # the context was dropped, so there is no answer to describe
            is_whole, max_tokens = _is_whole(request), request.sampling.max_tokens
            scaling = self._engine.scaling_note(request.context, len(token_ids), max_tokens, is_whole=is_whole)
        reasons = (self._engine.exactness_note, HIDDEN if request.hidden else "", scaling)
        note = "; ".join(filter(None, reasons))
        dequantization = self._engine.dequantization
        return ResponseAssembler(
            request_id,
            request,
            alphabet,
            ends,
            self._clock,
            note,
            tracing,
            before,
            dequantization,
            make_parser,
            warnings,
        )

    def _parsers(self, request: Generate, token_ids: Sequence[int]) -> Callable[[], AnswerParser | None]:
        """Makes a parser for each sample of a request."""
        form, tools = self._tokenizer.answer_format, tool_parameters(request.tools)
        return partial(answer_parser, form, tools, is_reasoning=self._tokenizer.ends_in_reasoning(token_ids))


def _is_whole(request: Generate) -> bool:
    """The value of `Prompt.is_whole` for this request."""
    return request.provenance is None and not request.hidden


def _charge_cached_input(emit: EventSink, num_requested: int, charge_input: Callable[[int], None]) -> EventSink:
    """Wraps `emit` to charge recomputed context tokens with `charge_input`. Tokens of the context are recomputed if its
    keys are rotated for another length. The question has `num_requested` tokens."""
    num_taken = 0

    def emit_all(event: engine_messages.Event) -> None:
        nonlocal num_taken
        emit(event)
        if isinstance(event, engine_messages.Admitted) and event.queue_position == 0:
            num_copied = event.prompt_tokens - num_requested - event.cached_tokens
            if num_copied > num_taken:
                charge_input(num_copied - num_taken)
                num_taken = num_copied

    return emit_all


def _record_request_id(request_id: str) -> None:
    """Records the id of the generation in the call, for observers."""
    if (call := CURRENT.get()) is not None:
        call.request_id = request_id
