"""Sequences: jobs that generate answers."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from coordinator.engine_messages import Admitted, Ended, EndReason, Failed, ProbeResult, Prompt
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.jobs import Job, Phase, Request
from coordinator.scheduling.prefill_cursor import PrefillCursor, lengthened
from coordinator.speculation.sequence_drafter import SequenceDrafter
from longleaf.errors import InvalidArgument, LongleafError
from longleaf.positions import OWN_ROPE
from longleaf.rank_protocol.row_delta import row_delta
from longleaf.rank_protocol.step import (
    MAX_ATTRIBUTED_SPANS,
    GrammarTerms,
    PenaltyHistory,
    Prefill,
    Row,
    SamplingTerms,
    Spans,
    StepResult,
    Work,
)
from longleaf.types import TokenRange


class SequenceJob(Job):
    """A generation. It stands for all samples of a request until the prompt is processed, then for one of them.

    `num_requested` counts the tokens of the answer that plans have requested, `generated` holds those that were
    sampled."""

    def __init__(
        self, request: Request, prompt: Prompt, prefill: PrefillCursor, num_blocks: BlockCount, samples: range
    ) -> None:
        super().__init__(request, request.id + samples.start, prefill, num_blocks)
        self.prompt = prompt
        self.samples = samples
        """Numbers of the samples that it stands for."""
        self.sampling = prompt.sampling.of_sample(samples.start)
        self.end_tokens = frozenset[int]() if prompt.sampling.ignore_end_token else prompt.end_tokens
        self.num_requested = 0
        self.generated = array("I")
        self.drafter: SequenceDrafter | None = None
        """The drafter of the answer, if it has one."""

    @property
    def sample(self) -> int:
        """The number of the sample that it answers."""
        return self.samples.start

    @property
    def num_tails(self) -> int:
        return len(self.samples)

    @property
    def represents_all_samples(self) -> bool:
        """The sequence stands for all samples of its request, so that its progress is that of the request."""
        return len(self.samples) == self.prompt.num_samples

    @property
    def is_sharing(self) -> bool:
        """Whether the prompt reuses cached tokens, and is itself cached, with its answer, for others. Keys that were
        computed with hidden tokens are of no use to others, and comparisons and probes compute all tokens."""
        return not (self.prompt.is_compared or self.prompt.is_probe or self.prompt.hidden)

    @property
    def context(self) -> str | None:
        return self.prompt.context

    @property
    def hidden(self) -> tuple[TokenRange, ...]:
        return self.prompt.hidden

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the context and the prompt."""
        return self.request.start + len(self.prompt.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def num_answer_left(self) -> int:
        return self.prompt.max_tokens - self.num_generated

    @property
    def can_end_early(self) -> bool:
        """The answer may end before its maximum length."""
        return bool(self.end_tokens or self.sampling.stop or self.sampling.stop_tokens or self.prompt.grammar)

    @property
    def has_rows(self) -> bool:
        """There are tokens of the answer, or probe results, that no plan has requested yet."""
        is_answering = self.phase is Phase.ANSWERING and not self.request.is_paused
        return is_answering and self.num_requested < max(1, self.max_requested)

    @property
    def max_requested(self) -> int:
        """Maximum number of tokens of the answer with the current rope."""
        most, border = self.prompt.max_tokens, self.request.ropes.border
        is_near = self.request.start + len(self.prefill.token_ids) <= border
        return min(most, border + 1 - self.num_prompt) if is_near else most

    @property
    def has_outgrown_rope(self) -> bool:
        """The answer continues, and its next token needs another rope, with which all earlier tokens must be
        recomputed."""
        return self.max_requested <= self.num_generated < self.prompt.max_tokens

    @property
    def is_recomputed(self) -> bool:
        """Its rope is another one than at the start of the answer."""
        return self.rope != self.request.ropes.at(self.num_prompt)

    def admitted(self, queue_position: int = 0) -> Admitted:
        """The message to the client at admission."""
        request = self.request
        return Admitted(self.num_prompt, request.num_cached, queue_position, request.is_beyond_trained)

    def ended(self, reason: EndReason, result: StepResult) -> Ended:
        """The message to the client at the end, without the times, which the engine adds."""
        attention = next(iter(result.attention.get(self.id, ())), None)
        found = ProbeResult(result.scores.get(self.id, ()), attention) if self.prompt.is_probe else None
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

    def unmatched(self, reason: str) -> Failed | LongleafError:
        """The outcome for the client when the grammar of the answer allows no further token."""
        return self.failed(InvalidArgument("constraint", f"{self._place()}: {reason}"))

    def failed(self, error: LongleafError) -> Failed | LongleafError:
        return Failed(error, self.sample) if self.num_tails == 1 else error  # the other samples continue

    def _tokens_of(self, work: Work) -> str:
        if isinstance(work, Prefill):
            is_read_again = work.start + len(work.token_ids) > self.num_prompt
            return super()._tokens_of(work) + (" and the answer" if is_read_again else "")
        return self._place()

    def _place(self) -> str:
        """The next token of the answer, in messages."""
        answer = f"answer {self.sample}" if self.prompt.num_samples > 1 else "the answer"
        return f"token {self.num_generated} of {answer}"

    # --- prefill ---

    def reuse(self, path: TokenPath, num_prefill: int) -> None:
        """Continues after `path`: the origin of the request and a cached prefix of the prompt."""
        num_reused = path.end - self.request.start
        self.prefill = PrefillCursor(path, self.prefill.token_ids, num_prefill, num_reused, num_reused)
        if not self.num_begins:
            self.request.num_cached = path.end
        elif self.is_recomputed:
            self.request.num_cached = min(self.request.num_cached, path.end)

    def answer(self) -> list["SequenceJob"]:
        """Starts the answer of one sample, once the prompt is processed. Returns the sequences of the others, which
        share the prompt and run once they have tails."""
        self.phase = Phase.ANSWERING
        others, self.samples = self.samples[1:], self.samples[:1]
        return [self._other(sample) for sample in others]

    def _other(self, sample: int) -> "SequenceJob":
        one = range(sample, sample + 1)
        other = SequenceJob(self.request, self.prompt, replace(self.prefill), self.num_blocks, one)
        other.phase, other.num_begins = self.phase, 1
        other.passed, other.is_spared = self.passed, self.is_spared
        return other

    def part(self, sample: int, generated: Sequence[int]) -> "SequenceJob":
        """One sample of a prompt that was answered in part: it continues after the tokens that were sent."""
        assert len(generated) < self.sampling.max_tokens
        part = SequenceJob(self.request, self.prompt, self.prefill, self.num_blocks, range(sample, sample + 1))
        part.generated.extend(generated)
        part.num_begins = 1
        return part

    def prompt_and_answer(self) -> "array[int]":
        """Token ids of the prompt and of the answer so far."""
        return array("I", self.prompt.token_ids) + self.generated

    def preempt(self, prefill: PrefillCursor, num_blocks: BlockCount) -> None:
        """Resets the sequence to the state before the prefill. The prompt and the answer so far are recomputed later,
        and the answer continues with its next token. Preemption does not change the answer, because the random numbers
        depend only on the index of the token."""
        self.prefill, self.num_blocks = prefill, num_blocks
        self.num_requested = self.num_generated

    # --- decoding ---

    def next_row(self, placer: BlockPlacer) -> Row:
        """Places the tokens of the next step: the rest of the prompt, or the token that was sampled last.

        The id of that token is unknown while the plan that samples it is under way; `append_token` sets it.
        """
        tail, prefill, index = self.tail, self.prefill, self.num_requested
        start, known = tail.segment.end, tail.placement.window_runs
        sent = tuple(prefill.token_ids[prefill.num_placed :])  # empty once the prompt is placed
        terms = self._terms() if sent else None
        token_ids = sent or (self.generated[-1] if index == self.num_generated else 0,)
        runs = tail.add_rows(token_ids, placer)
        prefill.num_placed += len(token_ids)
        self.num_requested += 1
        window_runs, num_reference = tail.placement.window_runs, self._num_reference(self.num_requested)
        if terms is not None:
            index = -1 if self.prompt.is_probe else index
            rope, more = self.rope, (self._spans(), self.hidden, self.prompt.num_scored)
            return Row(self.id, tail.path_ids, start, sent, runs, index, terms, num_reference, rope, window_runs, *more)
        window_runs = window_runs and row_delta(known, window_runs, placer.window_block_size)
        return Row(self.id, (), start, (), runs, index, None, num_reference, OWN_ROPE, window_runs)

    def _terms(self) -> SamplingTerms:
        """The parameters that rank 0 needs before the first row. Other ranks do not need them."""
        reference = tuple(self.prefill.token_ids) if self.prompt.is_compared else ()
        return SamplingTerms(self.sampling.choosing, self._penalty_history(), reference, self._grammar_terms())

    def _grammar_terms(self) -> GrammarTerms | None:
        """The grammar of the answer, with the tokens from which rank 0 rebuilds its state."""
        if not self.prompt.grammar:
            return None
        tenant = self.request.scheduling.tenant
        return GrammarTerms(self.prompt.grammar, tuple(sorted(self.end_tokens)), tenant, tuple(self.generated))

    def _spans(self) -> Spans | None:
        """The spans for which its rows report attention."""
        if (cuts := self.prompt.cuts) is None:
            return None
        num_segments, num_rows = len(self.request.origin.segments), self.prompt.num_reported
        return Spans(cuts.size, num_segments, self.num_prompt, cuts.layers, num_rows, cuts.num_opening)

    def _num_reference(self, num_requested: int) -> int:
        """Number of tokens to recompute for the comparison, once the plans have requested the complete answer; else
        0."""
        is_complete = num_requested == self.sampling.max_tokens
        return self.num_prompt + num_requested - 1 if self.prompt.is_compared and is_complete else 0

    @property
    def may_draft(self) -> bool:
        """Its rows may have drafts."""
        return self.max_drafts > 0

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of any of its rows. Attention is reported for each position of a row, and must fit
        into the result of a step."""
        if self.prompt.is_probe:
            return 0
        most, cuts = self.prompt.max_draft_tokens, self.prompt.cuts
        return most if cuts is None else min(most, MAX_ATTRIBUTED_SPANS // max(1, cuts.num_spans) - 1)

    @property
    def num_spans(self) -> int:
        """Maximum number of spans that it reports in a step."""
        return 0 if self.prompt.cuts is None else self.prompt.cuts.num_spans * (1 + self.max_drafts)

    def most_drafts(self, block_size: int) -> int:
        """Maximum number of drafts for a row that was placed just now. Drafts take no new block, and a step yields one
        token more than the accepted drafts."""
        left = self.max_requested - self.num_requested
        return min(self.max_drafts, left, self.tail.num_spare(block_size))

    def with_drafts(self, row: Row, draft_ids: tuple[int, ...], placer: BlockPlacer) -> Row:
        """The row with drafts after its token. Drafts are not recorded in the segment until they are accepted."""
        runs = lengthened(row.runs, len(draft_ids))
        window_runs = self.tail.window_runs_with_drafts(row.window_runs, len(draft_ids), placer)
        num_reference = self._num_reference(self.num_requested + len(draft_ids))
        drafted = {"draft_ids": draft_ids, "num_reference": num_reference}
        return structs.replace(row, runs=runs, window_runs=window_runs, **drafted)

    def accept(self, token_ids: Sequence[int], placer: BlockPlacer) -> None:
        """Records the drafts of the last row that were accepted; `append_token` adds their tokens to the answer."""
        self.tail.accept(token_ids, placer)
        self.num_requested += len(token_ids)

    def append_token(self, token_id: int) -> EndReason | None:
        """Adds the next sampled token to the answer. Returns the reason if that ends the answer, else None."""
        self.prefill.num_computed = len(self.prefill.token_ids)
        self.generated.append(token_id)
        segment, position = self.tail.segment, self.num_prompt + self.num_generated - 1
        if position < segment.end:
            segment.fill(position, token_id)
        return self.prompt.end_reason(token_id, self.num_generated)

    def _penalty_history(self) -> PenaltyHistory | None:
        """The tokens that penalties count and that rank 0 does not know."""
        if not self.sampling.has_penalties:
            return None
        generated = tuple(self.generated)
        if self.sampling.repetition_penalty == 1.0:
            return PenaltyHistory((), generated)
        return PenaltyHistory(tuple({*self.prefill.path.token_ids(), *self.prompt.token_ids}), generated)
