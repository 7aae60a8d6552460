"""What the ranks do in one step, and what rank 0 answers.

Every rank receives the same StepPlan; rank 0 answers it. A plan carries no generated ids: ranks keep the last sampled
token of each sequence themselves, so a plan can be sent before the one before it is answered. Ranks execute plans in
the order in which they were sent.
"""

import msgspec

from longleaf.positions import OWN_ROPE, Rope
from longleaf.runs import Run
from longleaf.sampling import Sampling, Token

Positions = tuple[int, int]
"""[start, end) of a path."""


class Spans(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the rows of a sequence are to tell of their attention: how much of it falls on each span of the context.

    Each of the first `num_segments` segments of the path is cut into spans from where it begins, as far as the path
    uses it, so its last one may be shorter. They are numbered along the path.
    """

    size: int
    """Tokens of a span: a power of two that divides the block size, so that none lies on two ranks."""
    num_segments: int
    prompt_end: int
    """Position where the prompt ends: what is behind those segments and before it is the prompt, the rest the
    answer."""
    layers: tuple[int, ...] = ()
    """Those that count, all of which see all keys; empty: all that do."""
    of_all_rows: bool = False
    """Each row of a step counts, and their mean is told; else the one alone that is sampled from."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """A chunk of prompt tokens, cut over the ranks: each rank computes its piece and keeps its keys.

    Tokens whose keys were lost are read again in the same way: their pieces lie among what is held. All that is before
    a piece is held, or in another piece.
    """

    path: tuple[int, ...]
    """Segments the tokens may attend to, in order; the last receives the chunk."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    """Those of the pieces, one piece after the other."""
    pieces: tuple[Run, ...]
    """In order of position, at most one per rank; with replicated windows each begins where the one before ends."""
    rope: Rope = OWN_ROPE
    window_runs: tuple[Run, ...] = ()
    """With replicated windows, all runs of EVERY_RANK that the last segment has in this step, in order, in the windows'
    pool: tokens before the chunk that it sees, and those of the chunk that the token after it will see. They replace
    what earlier plans told of this segment."""
    hidden: tuple[Positions, ...] = ()
    """What of the path none of the tokens reads, in order."""


class PenaltyHistory(msgspec.Struct, frozen=True):
    """What penalties must know of a sequence's past. Rank 0 adds the tokens that it samples from then on."""

    token_ids: tuple[int, ...]
    """Distinct ids of context and prompt; empty when no repetition penalty asks for them."""
    generated: tuple[int, ...]
    """Ids of the answer so far, each as often as it was generated."""


class SamplingTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of a sequence are chosen. Told once; rank 0 keeps it until the sequence is released."""

    sampling: Sampling
    """Without stops: those are the coordinator's business."""
    seen: PenaltyHistory | None = None
    """If the sequence has penalties."""
    reference_ids: tuple[int, ...] = ()
    """If rank 0 shall compare its logits with those of plain attention: the ids before its answer."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence that every rank computes: the last prompt token, a question, or one decoded token.

    The first row of a sequence tells everything, as does the first one after the sequence was released. What does not
    change is left out of those that follow: ranks remember it (`longleaf.rank_protocol.row_delta`).
    """

    sequence: int
    path: tuple[int, ...]
    """Segments the tokens may attend to, in order; the last receives the tokens. Empty where the sequence goes on: then
    path and rope are those of its row before."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    """Empty: the one token that was sampled last."""
    runs: tuple[Run, ...]
    """Runs that receive the tokens, with the extent that they have after this step."""
    token_index: int
    """Index in the answer of the token to sample from the last position that is no draft's; -1 samples nothing."""
    terms: SamplingTerms | None = None
    """With the first row."""
    num_reference: int = 0
    """Tokens that rank 0 computes once more in this step, alone, to compare the answer that this row completes: if it
    has drafts, where all of them are accepted."""
    rope: Rope = OWN_ROPE
    window_runs: tuple[Run, ...] = ()
    """As of a chunk, but with all tokens of the row; where the sequence goes on, with the blocks alone that are new."""
    spans: Spans | None = None
    """With the first row: what this one and those that follow tell of their attention, if anything."""
    hidden: tuple[Positions, ...] = ()
    """With the first row: what of the path neither this one nor those that follow read, in order."""
    num_scored: int = 0
    """So many of its last tokens are scored: the logprob of each, from the row before it."""
    draft_ids: tuple[int, ...] = ()
    """Guesses of the tokens that follow. They are computed at the positions behind the others, and each is accepted
    whose guess is the token that was sampled there, up to the first one that is not. Runs and windows have the extent
    that they have if all are accepted; ranks cut it back. Rows that are scored, or tell of their attention, have none.
    """

    @property
    def num_known(self) -> int:
        """Tokens that are no drafts."""
        return max(1, len(self.token_ids))

    @property
    def num_tokens(self) -> int:
        return self.num_known + len(self.draft_ids)

    @property
    def is_compared(self) -> bool:
        """Whether this row completes an answer that is compared."""
        return self.num_reference > 0


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Replicated rows of one or more sequences."""

    rows: tuple[Row, ...]


class RunTransfer(msgspec.Struct, frozen=True, array_like=True):
    """A run, or some of its blocks, that goes to another rank: the same positions."""

    segment: int
    source: Run
    """Where it is held until the step is answered."""
    target: Run
    """Where it is held from then on: in blocks that hold nothing."""


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Keys and values go from rank to rank, as they are kept."""

    transfers: tuple[RunTransfer, ...]
    windows: tuple[Run, ...] = ()
    """With replicated windows, runs of EVERY_RANK that rank 0 hands out to all: there are ranks that know of them, and
    have nothing in them yet."""

    @property
    def num_tokens(self) -> int:
        return sum(len(transfer.target) for transfer in self.transfers) + sum(map(len, self.windows))


class RestorePortion(msgspec.Struct, frozen=True, array_like=True):
    """Positions of a fetched piece that one rank takes in: whole blocks of it, or all that its last one has."""

    ticket: int
    """Under which the rank has fetched the piece."""
    runs: tuple[Run, ...]
    """All on that rank, in blocks that hold nothing."""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Keys and values of a sealed segment come back from fetched pieces, as they were kept. Ranks may never have heard
    of the segment. What was fetched stays until it is discarded."""

    segment: int
    start: int
    """Position of the segment's first token."""
    portions: tuple[RestorePortion, ...]
    window_runs: tuple[Run, ...] = ()
    """With replicated windows, all runs of EVERY_RANK that the segment has then; none: those that it has stay."""
    window_ticket: int = 0
    """Under which each rank has fetched the piece of these."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All that come back, in the order of the portions."""
        return tuple(run for portion in self.portions for run in portion.runs)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, (*self.runs, *self.window_runs)))


Work = Prefill | Decode | Move | Restore


class StepPlan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan"):
    """What every rank must do in one step."""

    epoch: int
    step: int
    work: Work
    release_segments: tuple[int, ...] = ()
    """Segments to forget before the work; their blocks may be handed out again in this very plan."""
    release_sequences: tuple[int, ...] = ()
    """Sequences whose last token, terms and history may be forgotten."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, moved or restored."""
        match self.work:
            case Prefill() as work:
                return len(work.token_ids)
            case Decode() as work:
                return sum(row.num_tokens for row in work.rows)
            case Move() | Restore() as work:
                return work.num_tokens

    @property
    def kind(self) -> str:
        """What is done: `prefill`, `decode`, `move` or `restore`."""
        return str(self.work.__struct_config__.tag)

    @property
    def may_overlap(self) -> bool:
        """Whether ranks may begin it before they have answered the one before it. A chunk takes long to be told to a
        device, and so does a comparison, while an answer could go out; who is asked about a sequence must still know
        it; and what is held behind drafts is known only when they are accepted or not."""
        is_short = isinstance(self.work, Decode) and not self.num_reference and not self.num_drafts
        return is_short and not self.release_sequences

    @property
    def num_drafts(self) -> int:
        return sum(len(row.draft_ids) for row in self.work.rows) if isinstance(self.work, Decode) else 0

    @property
    def num_reference(self) -> int:
        """Tokens that rank 0 computes alone while the others wait, to compare."""
        return sum(row.num_reference for row in self.work.rows) if isinstance(self.work, Decode) else 0


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """The logits of one answer, from attention spread over the ranks, beside those of plain attention on rank 0."""

    max_difference: float = 0.0
    """Largest absolute difference between two logits, plain attention in float32; NaN where one of them is."""
    max_logit: float = 0.0
    """Largest absolute logit of plain attention."""
    distance: float = 0.0
    """How far the logits of a token are from those of plain attention in float32, as a share of the spread of those:
    norms, and the median over the tokens."""
    plain_distance: float = 0.0
    """The distance of plain attention in `plain_dtype`: what rounding does."""
    plain_dtype: str = ""
    """`dtype`, or bfloat16 where that is int8, which plain attention does not know."""
    worst_index: int = 0
    """Index in the answer of the token at which they differ most."""
    num_tokens: int = 0
    """Tokens of the answer that were compared."""
    num_equal: int = 0
    """Tokens for which both would choose the same token greedily."""
    num_ranks: int = 0
    """Ranks that hold keys of the prompt or the answer."""
    dtype: str = ""
    """Coarsest numeric type on the way: of the weights, of keys and values, or of partials that travel."""
    seconds: float = 0.0
    """How long plain attention took."""
    failure: str = ""
    """Why there is nothing to compare with; empty when there is."""


NUM_OTHER_SHARES = 3
"""Of what is no span: the prompt, the answer, sinks."""
MAX_TOLD_SPANS = 1 << 19
"""Spans of which all rows of a step tell at most."""
SPAN_BYTES = 12
"""What is told of one."""
HEADS_PER_LAYER = 1 << 16
"""In the number that stands for a head."""


class Attention(msgspec.Struct, frozen=True, array_like=True):
    """Where a row of a sequence attended, or in the mean its rows. Numbers as bytes of the machine's order."""

    means: bytes
    """float32, the mean over heads of all layers that count of what falls on each span, then on the prompt, on the
    answer, and on sinks: together 1."""
    largest: bytes
    """float32, what of a span's the largest head has; of a mean over rows, in any of these."""
    heads: bytes
    """int32, which one that is: its layer times HEADS_PER_LAYER, and its number in there."""


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """Rank 0 to coordinator: sampled tokens by sequence, in the plan's order of rows. Of a move or a restore it
    says that every rank has what came to it, and knows where all lies now."""

    epoch: int
    step: int
    tokens: dict[int, tuple[Token, ...]]
    """At least one: the drafts that were accepted, and the token that was sampled behind them."""
    kv_bytes_read: int = 0
    """Bytes of keys and values that rank 0 read from its pool in a decode step, over all layers."""
    merge_bytes: int = 0
    """Bytes of packed partials that rank 0 gave to merges in a step of prefill or decode, over all layers."""
    seconds: float = 0.0
    """How long rank 0 computed."""
    not_finite: tuple[int, ...] = ()
    """Sequences that have no token, because their logits are NaN or infinite. They cannot go on."""
    has_finite_keys: bool = True
    """Whether all keys and values of a chunk are finite, on all ranks; if not, nobody may read it."""
    comparisons: dict[int, ComparisonRow] = msgspec.field(default_factory=dict[int, ComparisonRow])
    """By sequence, of the answers that this step completed and that are compared; their seconds count in `seconds`."""
    attention: dict[int, Attention] = msgspec.field(default_factory=dict[int, Attention])
    """By sequence, of those that were told to tell."""
    scores: dict[int, tuple[float, ...]] = msgspec.field(default_factory=dict[int, tuple[float, ...]])
    """By sequence, natural logarithms of the probabilities of tokens that are scored, by the model's own
    distribution."""
