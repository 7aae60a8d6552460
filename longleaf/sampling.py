"""Sampling parameters and log probabilities."""

import msgspec

from longleaf.errors import InvalidArgument

MAX_TOKENS = 1 << 20
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_ID = (1 << 31) - 1
"""Largest token id, and largest top-k: the protocol has 32 bits for them."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one generation. The defaults are greedy decoding of 128 tokens.

    They are applied in transformers' order: logit bias, penalties, temperature, top-k, top-p, min-p.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    """Keeps the most likely tokens up to this cumulative probability; 0 keeps only the most likely one."""
    min_p: float = 0.0
    """Drops tokens with less than this fraction of the highest probability."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of all tokens in context, prompt and answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token of the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each occurrence in the answer."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict[int, float])
    """Added to the logits of these ids."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Ids that end the generation; the final one is reported, without text."""
    ignore_end_token: bool = False
    num_logprobs: int | None = None
    """Return each token's logprob and this number of alternatives; None returns none."""

    def check(self) -> None:
        """Raises InvalidArgument naming the first field that is out of range."""
        for field, is_right, limit in (
            ("max_token_count", 1 <= self.max_tokens <= MAX_TOKENS, f"between 1 and {MAX_TOKENS:,}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", 0 <= self.top_k <= MAX_ID, f"between 0 and {MAX_ID:,}"),
            ("top_p", 0.0 <= self.top_p <= 1.0, "between 0 and 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("logit_bias", len(self.logit_bias) <= MAX_BIASES, f"at most {MAX_BIASES:,} ids"),
            ("logit_bias", all(0 <= i <= MAX_ID for i in self.logit_bias), f"for ids from 0 to {MAX_ID:,}"),
            ("logit_bias", all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "between -100 and 100"),
            ("seed", 0 <= self.seed < 2**64, "between 0 and 2^64 - 1"),
            ("stop", len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} strings"),
            ("stop", all(0 < len(s.encode()) <= MAX_STOP_BYTES for s in self.stop), f"1-{MAX_STOP_BYTES} bytes each"),
            ("stop_token_ids", len(self.stop_tokens) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} ids"),
            ("stop_token_ids", all(0 <= i <= MAX_ID for i in self.stop_tokens), f"ids from 0 to {MAX_ID:,}"),
            ("logprob_count", 0 <= (self.num_logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        ):
            if not is_right:
                raise InvalidArgument(f"sampling.{field}", f"must be {limit}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the argmax of the unmodified logits."""
        return self.is_greedy and not self.has_penalties and not self.logit_bias

    @property
    def choosing(self) -> "SamplingParams":
        """The parameters without stops, which do not affect the choice of tokens."""
        return msgspec.structs.replace(self, stop=(), stop_tokens=(), ignore_end_token=False)

    def of_sample(self, sample: int) -> "SamplingParams":
        """The parameters of sample number `sample`, whose seed is larger by that number."""
        return msgspec.structs.replace(self, seed=(self.seed + sample) % 2**64) if sample else self


GREEDY = SamplingParams()


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float
    token_bytes: bytes | None = None
    """The bytes that it would have added to the text; None if not requested."""


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log probabilities under the model's own distribution: softmax of the logits, before bias, penalties, temperature
    and filters. `top` has the most likely tokens, in descending order."""

    logprob: float
    top: tuple[TokenLogprob, ...]
    token_bytes: bytes | None = None
    """The bytes that the token adds to the text, possibly an incomplete character; None if not requested."""


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A generated token with its logprobs. It cannot be part of a reference cycle, so the garbage collector need not
    track it."""

    id: int
    logprobs: Logprobs | None = None
    """Set if requested by the sampling parameters."""
