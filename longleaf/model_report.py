"""What is known of a checkpoint before anybody serves it. Sizes in bytes, counts in tokens."""

import msgspec

from longleaf.config import WindowKeys
from longleaf.fingerprint import Fingerprint


class TextReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator reads of a checkpoint: config, tokenizer and chat template."""

    reason: str = ""
    """Why it is refused; empty when it is not."""
    architecture: str = ""
    max_positions: int = 0
    """Tokens of context that the config tells; 0 when it does not."""
    vocabulary_size: int = 0
    has_chat_template: bool = False


class AttentionKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend alike."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Dim of the values; None: it is that of the keys."""
    window: int | None = None
    """Tokens that a query sees; None: everything before it."""
    section: int | None = None
    """Size of the sections, of which a query sees its own only."""


class ReplicatedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve --window-keys replicated` makes of keys and values."""

    bytes_per_token: int
    """Bytes of one token, over the layers that see everything, rounded up; 0 when there are none."""
    bytes_per_window: int
    """On each rank, for each place where a context can be continued: of as many tokens as any other layer sees."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of one rank, and the tokens that it holds of this model, in whole blocks."""

    rank: int
    kv_bytes: int
    tokens: int


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the pools of a fleet hold of this model, its windowed layers' keys lying as `window_keys` says."""

    window_keys: WindowKeys
    reason: str = ""
    """Why no such fleet starts; empty when it does."""
    rooms: tuple[RankPlan, ...] = ()
    tokens: int = 0
    """Tokens that the pools of all ranks hold together."""
    is_unlimited: bool = False
    """No token takes room for ever, and `tokens` is only a bound on positions."""
    window_tokens: int = 0
    """Tokens whose keys of windowed layers every rank holds at most; 0 where they are sharded."""
    ends: int = 0
    """Ends of contexts that these are enough for; generations take from them too."""


class AttentionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank makes of a checkpoint."""

    reason: str = ""
    """Why it is refused; empty when it is not."""
    dtype: str = ""
    kv_dtype: str = ""
    """Type in which keys and values are kept."""
    kinds: tuple[AttentionKind, ...] = ()
    trained: int = 0
    """Tokens of context that the model was trained for, with what its rope was stretched to; 0 when nothing tells."""
    bytes_per_token: int = 0
    """Keys and values of one token as they are kept, over all layers, rounded up."""
    replicated: ReplicatedReport | None = None
    """If there are layers that do not see everything."""
    weight_bytes: int = 0
    """Bytes of weights on each rank: all hold the whole model."""
    has_weights: bool = False
    """Whether they were read."""
    is_exact: bool | None = None
    """Whether logits are those of plain attention; None where that is unknown, as without weights."""
    exactness_note: str = ""
    """Why it is unknown; empty where it is known."""
    plans: tuple[CapacityPlan, ...] = ()
    """With sharded keys, and with replicated windows if there are layers that do not see everything."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a checkpoint is supported, and what serving it takes."""

    model: str
    is_supported: bool
    """Whether nothing that was looked at is refused. Without weights that leaves open whether answers are exact."""
    text: TextReport
    attention: AttentionReport
    fingerprint: Fingerprint | None = None
    """Of its folder; None where something in it is missing or cannot be read, weights among it."""
    unread: str = ""
    """What that is; empty when there is a fingerprint."""

    @property
    def plans(self) -> tuple[CapacityPlan, ...]:
        return self.attention.plans

    @property
    def reasons(self) -> list[str]:
        """Why it is refused."""
        return [reason for reason in (self.text.reason, self.attention.reason) if reason]
