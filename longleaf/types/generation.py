"""Generations: what is asked, and the events that answer it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from longleaf.sampling import Logprobs, Sampling
from longleaf.types.conversation import Conversation
from longleaf.types.provenance import Attribution, Provenance, TokenRange
from longleaf.types.scheduling_options import ClaimOptions, SchedulingOptions

FinishReason = Literal["unspecified", "end_token", "stop", "length", "stop_token"]
"""`unspecified` is what a later version of the service may say and this client does not know."""


class SamplingOptions(TypedDict, total=False):
    """Sampling as a caller gives it. The service fills in what is left out: 128 tokens, a random seed, and greedy
    decoding or, with `--sampling-defaults model`, what generation_config.json recommends."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...] | list[str] | None
    ignore_end_token: bool | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[int, float] | None
    stop_tokens: tuple[int, ...] | list[int] | None
    num_logprobs: int | None


class GenerateOptions(SamplingOptions, ClaimOptions, total=False):
    """All that a caller may say about a generation besides its input."""

    use_chat_template: bool | None
    """Whether a plain prompt is put into the model's chat template; None: if it has one."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further names that the chat template can use, such as `enable_thinking`; values as in JSON."""
    with_token_bytes: bool
    """With `num_logprobs`: tells the bytes of each token, too."""
    until_full: bool
    """The answer may be as long as there is room for, instead of `max_tokens`."""
    num_samples: int
    """Answers to the same prompt, which is read once."""
    provenance: Provenance | None
    """Tells where in the context the answer comes from, with Finished, and perhaps with each Delta."""
    hidden: Sequence[TokenRange]
    """Tokens [start, end) of the context that neither prompt nor answer reads, in ascending order."""
    max_draft_tokens: int | None
    """Most tokens to draft in a step; 0: none, None: as many as the service does."""
    request_id: str
    """Names the generation, so that it never runs twice."""
    resumable: bool
    """When the stream breaks, the client goes on with it where it broke."""
    timeout: float | None
    """Seconds for the whole call."""


class Generate(SchedulingOptions, frozen=True, kw_only=True):
    """A request to generate; `input` is text, token ids that are used as they are, or a conversation."""

    input: str | Sequence[int] | Conversation
    context: str | None = None
    """Id of the context to ask, without the `contexts/` prefix."""
    use_chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Further names that the chat template can use; values as in JSON."""
    sampling: Sampling
    with_token_bytes: bool = False
    """Logprobs carry the bytes of their tokens."""
    until_full: bool = False
    """The answer may be as long as there is room for, whatever `sampling` says."""
    num_samples: int = 1
    provenance: Provenance | None = None
    """Asks where in the context the answer comes from."""
    hidden: tuple[TokenRange, ...] = ()
    """Tokens [start, end) of the context that neither prompt nor answer reads."""
    max_draft_tokens: int | None = None
    """Most tokens to draft in a step, guesses of how the answer goes on; None: as many as the service does."""
    request_id: str = ""
    """Names the generation; the service makes one when empty."""
    resume_seconds: float = 0.0
    """How long the generation is held when nobody reads it."""


class Resume(msgspec.Struct, frozen=True):
    """A request to go on with a generation, after `token_index` tokens of all its samples together."""

    request_id: str
    token_index: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one generation; the cached ones are part of the prompt's, the accepted ones of the answer's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    """Guesses that steps have tried."""
    accepted_tokens: int = 0
    """Those of them that became tokens of the answer."""


class Timings(msgspec.Struct, frozen=True):
    """Queue and first token count from arrival, prefill from the end of the queue to the first token; decode from
    there to the last."""

    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """The request was admitted; comes again when its place in the queue changes: 1 is next, 0 has begun."""

    prompt_tokens: int
    cached_tokens: int
    queue_position: int = 0
    request_id: str = ""
    is_beyond_trained: bool = False
    """Prompt and answer may go beyond the positions that the model was trained for."""
    is_exact: bool = False
    """Whether the answer will be; see Finished."""
    exactness_note: str = ""
    """Why it will not be exact; empty where it will."""


class Progress(msgspec.Struct, frozen=True):
    """The prompt is being read."""

    processed: int
    total: int


class Recovering(msgspec.Struct, frozen=True):
    """Ranks were lost, and the request waits while keys and values that went with them are computed again."""

    lost_tokens: int
    """Tokens of this request whose keys and values are still missing."""
    recovered_tokens: int
    """Tokens that are done, of all that the service computes again now, for whomever."""
    total_tokens: int
    """All of these. Both are 0 where tenants are not told of others."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of the answer: whole characters, and the tokens that carry them. `index` is that of the first token.

    `logprobs` has one entry for each token, or none when they were not asked for.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()
    sample: int = 0
    attribution: Attribution | None = None
    """Where these tokens come from, if that was asked for each."""


class Finished(msgspec.Struct, frozen=True):
    """The end of the answer. `matched_stop` is empty unless the reason is `stop`."""

    reason: FinishReason
    matched_stop: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    sample: int = 0
    is_exact: bool = False
    """No key, value or partial was rounded more than the model itself rounds, nothing was hidden, and the model was
    compared with plain attention at the start."""
    attribution: Attribution | None = None
    """Where the tokens come from that Deltas told, if that was asked."""
    exactness_note: str = ""
    """Why the answer is not exact, such as "not verified"; empty where it is."""


Event = Started | Progress | Recovering | Delta | Finished
