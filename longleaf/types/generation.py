"""Generation requests, and the events of their streams."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from longleaf.sampling import Logprobs, SamplingParams
from longleaf.types.constraint import Constraint
from longleaf.types.conversation import Conversation, ToolCall
from longleaf.types.provenance import Attribution, Provenance, TokenRange
from longleaf.types.scheduling_options import SchedulingKwargs, SchedulingOptions

FinishReason = Literal["unspecified", "end_token", "stop", "length", "stop_token"]
"""`unspecified` is a reason that this client version does not know."""


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters as keyword arguments. The service's defaults are 128 tokens, a random seed, and greedy
    decoding or, with `--sampling-defaults model`, the recommendation of generation_config.json."""

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


class GenerateOptions(SamplingOptions, SchedulingKwargs, total=False):
    """Keyword arguments of a generation, except the input."""

    use_chat_template: bool | None
    """Whether to apply the model's chat template to a plain prompt; None: if the model has one."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Additional variables for the chat template, such as `enable_thinking`; JSON values."""
    tools: Sequence[Mapping[str, Any]]
    """Tools that the model may call, in OpenAI's form; only with a conversation."""
    parse_answer: bool
    """Split the answer into reasoning, tool calls and text."""
    single_tool_call: bool
    """End the answer after its first tool call. Requires `parse_answer`."""
    require_tool_call: bool
    """Constrain the answer to tool calls, after reasoning if the model reasons."""
    required_tool: str
    """Name of the tool that the answer must call, once."""
    with_token_bytes: bool
    """With `num_logprobs`: also return the bytes of each token."""
    until_full: bool
    """Allow the answer to fill the available capacity, instead of `max_tokens`."""
    num_samples: int
    """Number of answers to the same prompt, which is prefilled once."""
    provenance: Provenance | None
    """Request source attribution within the context, in Finished and optionally in each Delta."""
    hidden: Sequence[TokenRange]
    """Tokens [start, end) of the context that neither prompt nor answer attends to, in ascending order."""
    max_draft_tokens: int | None
    """Maximum number of draft tokens per step; 0: none, None: the service's default."""
    constraint: Constraint | None
    """A constraint on the text of each answer, such as a JSON Schema."""
    request_id: str
    """Identifies the generation, so that it never runs twice."""
    resumable: bool
    """Resume automatically after the stream breaks."""
    timeout: float | None
    """Seconds for the whole call."""


class Generate(SchedulingOptions, frozen=True, kw_only=True):
    """A generation request; `input` is text, token ids that are used unchanged, or a conversation."""

    input: str | Sequence[int] | Conversation
    context: str | None = None
    """Id of the context, without the `contexts/` prefix."""
    use_chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Additional variables for the chat template; JSON values."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the model may call, in OpenAI's form."""
    parse_answer: bool = False
    """The answer is split into reasoning, tool calls and text."""
    single_tool_call: bool = False
    """The answer ends after its first tool call."""
    require_tool_call: bool = False
    """The answer is constrained to tool calls, after reasoning if the model reasons."""
    required_tool: str = ""
    """Name of the tool that the answer must call, once; empty: any."""
    sampling: SamplingParams
    with_token_bytes: bool = False
    """Logprobs include the bytes of their tokens."""
    until_full: bool = False
    """The answer may fill the available capacity, regardless of the maximum in `sampling`."""
    num_samples: int = 1
    provenance: Provenance | None = None
    """Requests source attribution within the context."""
    hidden: tuple[TokenRange, ...] = ()
    """Tokens [start, end) of the context that neither prompt nor answer attends to."""
    max_draft_tokens: int | None = None
    """Maximum number of draft tokens per step; None: the service's default."""
    constraint: Constraint | None = None
    """A constraint on the text of each answer."""
    request_id: str = ""
    """Identifies the generation; the service generates one if empty."""
    resume_seconds: float = 0.0
    """How long the service keeps the generation without a reader."""


class Resume(msgspec.Struct, frozen=True):
    """A request to resume a generation after `token_index` tokens, counted over all samples."""

    request_id: str
    token_index: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one generation. Cached tokens are part of the prompt, accepted ones of the answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    """Draft tokens that steps have verified."""
    accepted_tokens: int = 0
    """Draft tokens that became tokens of the answer."""
    reasoning_tokens: int = 0
    """Tokens of the reasoning, with its markers; part of the answer. Only with `parse_answer`."""


class Timings(msgspec.Struct, frozen=True):
    """Queue time and time to first token count from arrival, prefill from the end of the queue to the first token,
    decode from the first token to the last."""

    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """The request was admitted. Sent again when its queue position changes: 1 is next, 0 has started."""

    prompt_tokens: int
    cached_tokens: int
    queue_position: int = 0
    request_id: str = ""
    is_beyond_trained: bool = False
    """Whether prompt and answer may exceed the positions that the model was trained for."""
    is_exact: bool = False
    """Whether the answer will be exact; see Finished."""
    exactness_note: str = ""
    """Reason why it will not be exact; empty if it will."""
    dequantization: str = ""
    """The stored layout and the computed type of quantized weights; see Finished."""
    warnings: tuple[str, ...] = ()
    """Restrictions of this answer, such as tool calls in an unknown format."""


class Progress(msgspec.Struct, frozen=True):
    """Progress of the prefill."""

    processed: int
    total: int


class Recovering(msgspec.Struct, frozen=True):
    """Ranks were lost, and the request waits until their keys and values are recomputed, or their weights are read."""

    lost_tokens: int
    """Tokens of this request whose keys and values are still missing."""
    recovered_tokens: int
    """Recomputed tokens of the current recovery, over all contexts."""
    total_tokens: int
    """Total tokens of the current recovery. Both are 0 if tenants are isolated from each other."""
    missing_weights: float = 0.0
    """The fraction of the weights that no rank held after a loss: all answers wait until ranks have read them."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of the answer: whole characters and their tokens. `index` is that of the first token.

    `logprobs` has one entry per token, or none if not requested.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()
    sample: int = 0
    attribution: Attribution | None = None
    """Attribution of these tokens, if requested per token."""
    reasoning: str = ""
    """Reasoning; only with `parse_answer`. `text` has neither reasoning nor tool calls then."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete calls; only with `parse_answer`."""


class Finished(msgspec.Struct, frozen=True):
    """The end of the answer. `matched_stop` is empty unless the reason is `stop`, and where a constraint ended the
    answer."""

    reason: FinishReason
    matched_stop: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    sample: int = 0
    is_exact: bool = False
    """No key, value or partial was rounded more than the model itself rounds, no token was hidden, and the model was
    verified against plain attention at startup."""
    attribution: Attribution | None = None
    """Attribution of the tokens of all Deltas, if requested."""
    exactness_note: str = ""
    """Reason why the answer is not exact, such as "not verified"; empty if it is."""
    dequantization: str = ""
    """The stored layout and the computed type of quantized weights, such as "fp8 128x128 checkpoint, computed in
    bfloat16": exact then means equal to the model with the dequantized weights. Empty if they are not quantized."""


Event = Started | Progress | Recovering | Delta | Finished
