"""How the next token is chosen."""

import msgspec

from longleaf.errors import InvalidArgument

MAX_TOKENS = 1 << 20
MAX_STOPS = 16
MAX_STOP_BYTES = 1024


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one generation. The defaults are greedy decoding of 128 tokens."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_end_token: bool = False

    def check(self) -> None:
        """Raises InvalidArgument naming the first field that is out of range."""
        for field, is_right, limit in (
            ("max_token_count", 1 <= self.max_tokens <= MAX_TOKENS, f"between 1 and {MAX_TOKENS}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", 0 <= self.top_k < 2**31, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**64, "between 0 and 2^64 - 1"),
            ("stop", len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} strings"),
            ("stop", all(0 < len(s.encode()) <= MAX_STOP_BYTES for s in self.stop), f"1-{MAX_STOP_BYTES} bytes each"),
        ):
            if not is_right:
                raise InvalidArgument(f"sampling.{field}", f"must be {limit}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
