"""Sequences: jobs that answer."""

from array import array
from collections.abc import Sequence as TokenIds
from dataclasses import replace

from msgspec import structs

from coordinator.engine_messages import Admitted, Ended, EndReason, Failed, ProbeResult, Prompt
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.jobs import Job, Phase, Request
from coordinator.scheduling.prefill_cursor import PrefillCursor, lengthened
from coordinator.speculation.sequence_drafter import SequenceDrafter
from longleaf.errors import LongleafError
from longleaf.positions import OWN_ROPE
from longleaf.rank_protocol.row_delta import growth
from longleaf.rank_protocol.step import PenaltyHistory, Prefill, Row, SamplingTerms, Spans, StepResult, Work
from longleaf.types import TokenRange


class Sequence(Job):
    """One live generation: while the prompt is read for the first time, for all its samples, then for one of them.

    `num_asked` counts the tokens of the answer that plans have asked for, `generated` holds those that were sampled.
    """

    def __init__(
        self, request: Request, prompt: Prompt, reading: PrefillCursor, num_blocks: BlockCount, samples: range
    ) -> None:
        super().__init__(request, request.id + samples.start, reading, num_blocks)
        self.prompt = prompt
        self.samples = samples
        """Numbers of those that it stands for."""
        self.sampling = prompt.sampling.of_sample(samples.start)
        self.end_tokens = frozenset[int]() if prompt.sampling.ignore_end_token else prompt.end_tokens
        self.num_asked = 0
        self.generated = array("I")
        self.guesses: SequenceDrafter | None = None
        """What may follow, if its answer is drafted."""

    @property
    def sample(self) -> int:
        """The number of the one for which it answers."""
        return self.samples.start

    @property
    def num_tails(self) -> int:
        return len(self.samples)

    @property
    def speaks_for_all(self) -> bool:
        """Where the sequence stands is where its whole request stands: it is not one sample of several."""
        return len(self.samples) == self.prompt.num_samples

    @property
    def is_sharing(self) -> bool:
        """Reads what is held of a prompt that begins alike, and is held for others itself."""
        return self.prompt.context is None and not self.prompt.is_compared and not self.prompt.hidden

    @property
    def context(self) -> str | None:
        return self.prompt.context

    @property
    def hidden(self) -> tuple[TokenRange, ...]:
        return self.prompt.hidden

    @property
    def num_prompt(self) -> int:
        """Tokens of the context and the prompt."""
        return self.request.start + len(self.prompt.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def num_answer_left(self) -> int:
        return self.prompt.max_tokens - self.num_generated

    @property
    def can_end_early(self) -> bool:
        """Something other than the length may end the answer."""
        return bool(self.end_tokens or self.sampling.stop or self.sampling.stop_tokens)

    @property
    def has_rows(self) -> bool:
        """There are tokens of the answer that no plan has asked for yet, or what a probe is to find."""
        is_answering = self.phase is Phase.ANSWERING and not self.request.is_paused
        return is_answering and self.num_asked < max(1, self.max_asked)

    @property
    def max_asked(self) -> int:
        """Tokens of the answer that can be asked for with the rope by which it is rotated now."""
        most, border = self.prompt.max_tokens, self.request.ropes.border
        is_near = self.request.start + len(self.reading.token_ids) <= border
        return min(most, border + 1 - self.num_prompt) if is_near else most

    @property
    def has_outgrown_rope(self) -> bool:
        """The answer goes on, and its next token needs another rope: all before it is computed anew."""
        return self.max_asked <= self.num_generated < self.prompt.max_tokens

    @property
    def is_recomputed(self) -> bool:
        """Its rope is another one than that with which the answer began."""
        return self.rope != self.request.ropes.at(self.num_prompt)

    def admitted(self, queue_position: int = 0) -> Admitted:
        """What its client is told."""
        request = self.request
        return Admitted(self.num_prompt, request.num_cached, queue_position, request.is_beyond_trained)

    def ended(self, reason: EndReason, result: StepResult) -> Ended:
        """What its client is told, but for times, which the engine knows."""
        found = (
            ProbeResult(result.scores.get(self.id, ()), result.attention.get(self.id)) if self.prompt.is_probe else None
        )
        return Ended(
            reason=reason,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.request.num_cached,
            completion_tokens=self.num_generated,
            queue_seconds=0.0,
            first_token_seconds=0.0,
            decode_seconds=0.0,
            sample=self.sample,
            comparison=result.comparisons.get(self.id),
            found=found,
        )

    def failed(self, error: LongleafError) -> Failed | LongleafError:
        return Failed(error, self.sample) if self.num_tails == 1 else error  # the other samples go on

    def _tokens_of(self, work: Work) -> str:
        if isinstance(work, Prefill):
            is_read_again = work.start + len(work.token_ids) > self.num_prompt
            return super()._tokens_of(work) + (" and the answer" if is_read_again else "")
        answer = f"answer {self.sample}" if self.prompt.num_samples > 1 else "the answer"
        return f"token {self.num_generated} of {answer}"

    # --- reading ---

    def reuse(self, path: TokenPath, num_prefill: int) -> None:
        """Goes on after `path`, which holds the beginning of a plain prompt."""
        assert self.request.start == 0
        self.reading = PrefillCursor(path, self.reading.token_ids, num_prefill, path.end, path.end)
        if not self.num_begins:
            self.request.num_cached = path.end
        elif self.is_recomputed:
            self.request.num_cached = min(self.request.num_cached, path.end)

    def answer(self) -> list["Sequence"]:
        """The prompt is read: it answers for one sample from now on. Gives the others, which share what was read, and
        run once they have tails."""
        self.phase = Phase.ANSWERING
        others, self.samples = self.samples[1:], self.samples[:1]
        return [self._other(sample) for sample in others]

    def _other(self, sample: int) -> "Sequence":
        one = range(sample, sample + 1)
        other = Sequence(self.request, self.prompt, replace(self.reading), self.num_blocks, one)
        other.phase, other.num_begins = self.phase, 1
        other.passed, other.is_spared = self.passed, self.is_spared
        return other

    def part(self, sample: int, generated: TokenIds[int]) -> "Sequence":
        """One sample of a prompt that was answered before: it goes on after what was told of it."""
        assert len(generated) < self.sampling.max_tokens
        part = Sequence(self.request, self.prompt, self.reading, self.num_blocks, range(sample, sample + 1))
        part.generated.extend(generated)
        part.num_begins = 1
        return part

    def prompt_and_answer(self) -> "array[int]":
        """Token ids of prompt and answer so far."""
        return array("I", self.prompt.token_ids) + self.generated

    def preempt(self, reading: PrefillCursor, num_blocks: BlockCount) -> None:
        """Goes back to where nothing is read: what was generated is read again with the prompt, later, and the answer
        goes on at its next token. That is the same one as without: randomness depends on the token's index alone."""
        self.reading, self.num_blocks = reading, num_blocks
        self.num_asked = self.num_generated

    # --- answering ---

    def next_row(self, placer: BlockPlacer) -> Row:
        """Places the tokens of the next step: the rest of the prompt, or the token that was sampled last.

        That one may still be unknown here, for the plan that samples it may be under way: `take` tells its id.
        """
        tail, reading, index = self.tail, self.reading, self.num_asked
        start, known = tail.segment.end, tail.holding.window_runs
        sent = tuple(reading.token_ids[reading.num_placed :])  # empty, once the prompt is placed
        terms = self._terms() if sent else None
        token_ids = sent or (self.generated[-1] if index == self.num_generated else 0,)
        runs = tail.add_rows(token_ids, placer)
        reading.num_placed += len(token_ids)
        self.num_asked += 1
        window_runs, num_reference = tail.holding.window_runs, self._num_reference(self.num_asked)
        if terms is not None:
            index = -1 if self.prompt.is_probe else index
            rope, more = self.rope, (self._spans(), self.hidden, self.prompt.num_scored)
            return Row(self.id, tail.path_ids, start, sent, runs, index, terms, num_reference, rope, window_runs, *more)
        window_runs = window_runs and growth(known, window_runs, placer.block_size)
        return Row(self.id, (), start, (), runs, index, None, num_reference, OWN_ROPE, window_runs)

    def _terms(self) -> SamplingTerms:
        """What rank 0 must know before the first row; others would only have to read it."""
        reference = tuple(self.reading.token_ids) if self.prompt.is_compared else ()
        return SamplingTerms(self.sampling.choosing, self._seen(), reference)

    def _spans(self) -> Spans | None:
        """What its rows are to tell of their attention."""
        if (cuts := self.prompt.cuts) is None:
            return None
        num_segments, is_probe = len(self.request.origin.segments), self.prompt.is_probe
        return Spans(cuts.size, num_segments, self.num_prompt, cuts.layers, is_probe)

    def _num_reference(self, num_requested: int) -> int:
        """Tokens to compute once more when so many of the answer have been asked for, and these are all."""
        is_complete = num_requested == self.sampling.max_tokens
        return self.num_prompt + num_requested - 1 if self.prompt.is_compared and is_complete else 0

    @property
    def may_draft(self) -> bool:
        """Its rows may have drafts: of what they attend to one token each is told, if anything is."""
        return self.prompt.max_draft_tokens > 0 and self.prompt.cuts is None and not self.prompt.is_probe

    def most_drafts(self, block_size: int) -> int:
        """Drafts that a row may have which was placed just now: they open no block, and one more token than are
        accepted will come."""
        left = self.max_asked - self.num_asked
        return min(self.prompt.max_draft_tokens, left, self.tail.num_spare(block_size))

    def with_drafts(self, row: Row, draft_ids: tuple[int, ...]) -> Row:
        """The row with drafts behind its token. In the books they are nowhere until some are accepted."""
        runs, window_runs = (lengthened(each, len(draft_ids)) for each in (row.runs, row.window_runs))
        num_reference = self._num_reference(self.num_asked + len(draft_ids))
        drafted = {"draft_ids": draft_ids, "num_reference": num_reference}
        return structs.replace(row, runs=runs, window_runs=window_runs, **drafted)

    def accept(self, token_ids: TokenIds[int]) -> None:
        """Drafts of the last row were what was sampled; `take` tells of them."""
        self.tail.accept(token_ids)
        self.num_asked += len(token_ids)

    def take(self, token_id: int) -> EndReason | None:
        """Adds the token that was sampled next to the answer, and tells why that ends it, if it does."""
        self.reading.num_read = len(self.reading.token_ids)
        self.generated.append(token_id)
        segment, position = self.tail.segment, self.num_prompt + self.num_generated - 1
        if position < segment.end:
            segment.fill(position, token_id)
        return self.prompt.end_reason(token_id, self.num_generated)

    def _seen(self) -> PenaltyHistory | None:
        """What rank 0 cannot know of the tokens that penalties count."""
        if not self.sampling.has_penalties:
            return None
        generated = tuple(self.generated)
        if self.sampling.repetition_penalty == 1.0:
            return PenaltyHistory((), generated)
        return PenaltyHistory(tuple({*self.reading.path.token_ids(), *self.prompt.token_ids}), generated)
