"""Plans of steps, which every rank executes, and their results, which rank 0 sends.

Every rank receives the same StepPlan, and rank 0 answers it. A plan contains no generated ids: ranks keep the last
sampled token of each sequence, so a plan can be sent before the previous one is answered. Ranks execute plans in the
order in which they were sent.
"""

import msgspec

from longleaf.positions import OWN_ROPE, Rope
from longleaf.rank_protocol.verdict import Verification
from longleaf.runs import Run
from longleaf.sampling import SamplingParams, Token

Positions = tuple[int, int]
"""[start, end) of a path."""


class Spans(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests the attention of a sequence's rows: the share that falls on each span of the context.

    Each of the first `num_segments` segments of the path is cut into spans from its start, as far as the path uses it,
    so its last span may be shorter. Spans are numbered along the path.
    """

    size: int
    """Tokens per span: a power of two that divides the block size, so that no span lies on two ranks."""
    num_segments: int
    prompt_end: int
    """End position of the prompt. Positions after the segments and before it are the prompt, later ones the answer."""
    layers: tuple[int, ...] = ()
    """Layers to include, all of them full-attention layers; empty: all full-attention layers."""
    num_rows: int = 0
    """Report the mean over so many last rows of a step; 0: each row that is sampled from."""
    num_lead: int = 0
    """Tokens at the start of the first segment that belong to no span: the chat template before a document, and tokens
    that act as attention sinks. Their share is reported separately."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """A chunk of prompt tokens, split over the ranks: each rank computes its piece and keeps its keys.

    Tokens with lost keys are recomputed in the same way; their pieces lie between existing runs. All earlier positions
    of a piece are stored, or belong to another piece.
    """

    path: tuple[int, ...]
    """Segments that the tokens attend to, in order; the last one receives the chunk."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    """Ids of the pieces, concatenated."""
    pieces: tuple[Run, ...]
    """In order of position, at most one per rank; with replicated windows they are contiguous."""
    rope: Rope = OWN_ROPE
    window_runs: tuple[Run, ...] = ()
    """With replicated windows, all runs of EVERY_RANK that the last segment has in this step, in order, in the windows'
    pool: tokens before the chunk that it attends to, and tokens of the chunk that the next token will attend to. They
    replace the segment's runs from earlier plans."""
    hidden: tuple[Positions, ...] = ()
    """Positions of the path that no token attends to, in order."""


class PenaltyHistory(msgspec.Struct, frozen=True):
    """The past of a sequence, for penalties. Rank 0 adds the tokens that it samples afterwards."""

    token_ids: tuple[int, ...]
    """Distinct ids of context and prompt; empty without repetition penalty."""
    generated: tuple[int, ...]
    """Ids of the answer so far, with repetitions."""


class GrammarTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammar that constrains an answer."""

    grammar: str
    """In llguidance's dialect of Lark, compiled before within the limits of `longleaf.grammars`."""
    end_tokens: tuple[int, ...]
    """Ids that are allowed exactly where the answer satisfies the grammar."""
    tenant: str = ""
    """The tenant of the request. Rank 0 keeps compiled grammars for the same tenant only."""
    generated: tuple[int, ...] = ()
    """Ids of the answer so far, from which the state is rebuilt."""


class SamplingTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of a sequence. Sent once; rank 0 keeps it until the sequence is released."""

    sampling: SamplingParams
    """Without stops, which the coordinator handles."""
    seen: PenaltyHistory | None = None
    """Set if the sequence has penalties."""
    reference_ids: tuple[int, ...] = ()
    """If rank 0 must compare its logits with those of plain attention: the ids before the answer."""
    grammar: GrammarTerms | None = None
    """Set if the answer is constrained."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence that every rank computes: the last prompt token, a question, or one decoded token.

    The first row of a sequence, and the first one after its release, is complete. Later rows omit unchanged fields,
    which the ranks remember (`longleaf.rank_protocol.row_delta`).
    """

    sequence: int
    path: tuple[int, ...]
    """Segments that the tokens attend to, in order; the last one receives the tokens. Empty for a continued sequence,
    which keeps path and rope of its previous row."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    """Empty: the last sampled token."""
    runs: tuple[Run, ...]
    """Runs that receive the tokens, with their extent after this step."""
    token_index: int
    """Index in the answer of the token to sample after the last position that is not a draft; -1 samples nothing."""
    terms: SamplingTerms | None = None
    """Set in the first row."""
    num_reference: int = 0
    """Tokens that rank 0 computes a second time in this step, without the other ranks, to compare the answer that this
    row completes; with drafts, only if all of them are accepted."""
    rope: Rope = OWN_ROPE
    window_runs: tuple[Run, ...] = ()
    """As in a chunk, but with all tokens of the row; for a continued sequence, only with the new blocks."""
    spans: Spans | None = None
    """Set in the first row, for all rows of the sequence; None reports no attention."""
    hidden: tuple[Positions, ...] = ()
    """Set in the first row, for all rows of the sequence: positions of the path that no row attends to, in order."""
    num_scored: int = 0
    """Number of last tokens to score: the logprob of each, from the row before it."""
    draft_ids: tuple[int, ...] = ()
    """Draft tokens, computed at the positions after the others. A draft is accepted if it equals the token sampled at
    its position, up to the first mismatch. Runs and windows have their extent for the case that all are accepted; ranks
    truncate them. Rows with scores have no drafts.
    """

    @property
    def num_known(self) -> int:
        """Number of tokens that are not drafts."""
        return max(1, len(self.token_ids))

    @property
    def num_tokens(self) -> int:
        return self.num_known + len(self.draft_ids)

    @property
    def is_compared(self) -> bool:
        """Whether this row completes an answer to compare with plain attention."""
        return self.num_reference > 0


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Replicated rows of one or more sequences."""

    rows: tuple[Row, ...]


class RunTransfer(msgspec.Struct, frozen=True, array_like=True):
    """A run, or some of its blocks, to move to another rank; the positions are equal."""

    segment: int
    source: Run
    """Location until the step is answered."""
    target: Run
    """Location afterwards, in free blocks."""


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Moves stored keys and values between ranks, without conversion."""

    transfers: tuple[RunTransfer, ...]
    windows: tuple[Run, ...] = ()
    """With replicated windows, runs of EVERY_RANK that rank 0 broadcasts to ranks that know them but have no contents
    yet."""

    @property
    def num_tokens(self) -> int:
        return sum(len(transfer.target) for transfer in self.transfers) + sum(map(len, self.windows))


class RestorePortion(msgspec.Struct, frozen=True, array_like=True):
    """Positions of a fetched piece that one rank restores: whole blocks, or the complete last block."""

    ticket: int
    """Ticket under which the rank has fetched the piece."""
    runs: tuple[Run, ...]
    """All on that rank, in free blocks."""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Restores stored keys and values of a sealed segment from fetched pieces. The segment may be unknown to the ranks.
    Fetched pieces are kept until they are discarded."""

    segment: int
    start: int
    """Position of the segment's first token."""
    portions: tuple[RestorePortion, ...]
    window_runs: tuple[Run, ...] = ()
    """With replicated windows, all runs of EVERY_RANK that the segment then has; empty: its runs are unchanged."""
    window_ticket: int = 0
    """Ticket under which each rank has fetched the piece with the window runs."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All restored runs, in the order of the portions."""
        return tuple(run for portion in self.portions for run in portion.runs)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, (*self.runs, *self.window_runs)))


Work = Prefill | Decode | Move | Restore


class StepPlan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan"):
    """The work of every rank in one step."""

    epoch: int
    step: int
    work: Work
    release_segments: tuple[int, ...] = ()
    """Segments to forget before the work; this plan may already reuse their blocks."""
    cut_segments: tuple[tuple[int, int], ...] = ()
    """Segments, and the positions from which on they are to be forgotten before the work, as `release_segments`."""
    release_sequences: tuple[int, ...] = ()
    """Sequences whose last token, sampling terms and history may be forgotten."""

    @property
    def num_tokens(self) -> int:
        """Number of computed, moved or restored tokens."""
        match self.work:
            case Prefill() as work:
                return len(work.token_ids)
            case Decode() as work:
                return sum(row.num_tokens for row in work.rows)
            case Move() | Restore() as work:
                return work.num_tokens

    @property
    def kind(self) -> str:
        """The kind of work: `prefill`, `decode`, `move` or `restore`."""
        return str(self.work.__struct_config__.tag)

    @property
    def may_overlap(self) -> bool:
        """Whether ranks may start it before they have answered the previous plan. False for prefill and comparisons,
        whose launch takes long and would delay the previous answer; for sequences that the previous plan's answer
        needs; and after drafts, whose accepted length is not yet known."""
        is_short = isinstance(self.work, Decode) and not self.num_reference and not self.num_drafts
        return is_short and not self.release_sequences

    @property
    def num_drafts(self) -> int:
        return sum(len(row.draft_ids) for row in self.work.rows) if isinstance(self.work, Decode) else 0

    @property
    def num_reference(self) -> int:
        """Tokens that only rank 0 computes, for comparisons, while the others wait."""
        return sum(row.num_reference for row in self.work.rows) if isinstance(self.work, Decode) else 0


NUM_OTHER_SHARES = 4
"""Shares besides the spans: prompt, answer, learned sinks, and the lead of the context (`Spans.num_lead`)."""
MAX_ATTRIBUTED_SPANS = 1 << 19
"""Maximum number of spans in the results of a step, over all rows."""
SPAN_BYTES = 12
"""Size of one span in the result."""
HEADS_PER_LAYER = 1 << 16
"""Multiplier of the layer in a head's number."""


class Attention(msgspec.Struct, frozen=True, array_like=True):
    """Attention of a row, or the mean over rows, of a sequence. Arrays as bytes in native byte order."""

    means: bytes
    """float32, mean over the heads of all included layers: the share of each span, then of the prompt, the answer,
    learned sinks, and the lead of the context; the sum is 1."""
    largest: bytes
    """float32, the largest share of a single head per span; for a mean over rows, the largest in any of them."""
    heads: bytes
    """int32, the head with that share: its layer times HEADS_PER_LAYER, plus its number in the layer."""

    @property
    def num_bytes(self) -> int:
        return len(self.means) + len(self.largest) + len(self.heads)


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """Rank 0 to coordinator: sampled tokens by sequence, in the plan's order of rows. The result of a move or a restore
    confirms that every rank has received its data and knows the new placement."""

    epoch: int
    step: int
    tokens: dict[int, tuple[Token, ...]]
    """At least one: the accepted drafts, and the token sampled after them."""
    kv_bytes_read: int = 0
    """Bytes of keys and values that rank 0 read from its pool in a decode step, over all layers."""
    merge_bytes: int = 0
    """Bytes of packed partials that rank 0 passed to merges in a prefill or decode step, over all layers."""
    seconds: float = 0.0
    """Computation time of rank 0."""
    not_finite: tuple[int, ...] = ()
    """Sequences without a token, because their logits are NaN or infinite. They cannot continue."""
    completed: tuple[int, ...] = ()
    """Sequences whose grammar allows no text after the token of this step."""
    unmatched: dict[int, str] = msgspec.field(default_factory=dict[int, str])
    """Sequences without a token, because of their grammar, and the reason. They cannot continue."""
    forced: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict[int, tuple[int, ...]])
    """By sequence, tokens of the text that its grammar forces after the tokens of this step. The model may divide the
    text into other tokens."""
    has_finite_keys: bool = True
    """Whether all keys and values of a chunk are finite, on all ranks; otherwise the chunk must not be read."""
    comparisons: dict[int, Verification] = msgspec.field(default_factory=dict[int, Verification])
    """By sequence, for the compared answers that this step completed; their durations are part of `seconds`."""
    attention: dict[int, tuple[Attention, ...]] = msgspec.field(default_factory=dict[int, tuple[Attention, ...]])
    """By sequence with spans: for each of its tokens, that of the row which it was sampled from; or the mean over
    rows."""
    scores: dict[int, tuple[float, ...]] = msgspec.field(default_factory=dict[int, tuple[float, ...]])
    """By sequence, natural logarithms of the probabilities of scored tokens, from the model's unmodified distribution.
    """
