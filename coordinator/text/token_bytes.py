"""The bytes of the tokens of one answer. The joined bytes are the bytes of its text, even where the text is ambiguous:
a character may span several tokens, and invalid UTF-8 is shown as U+FFFD."""

from collections.abc import Collection

from msgspec.structs import replace

from longleaf.sampling import Token, TokenLogprob
from longleaf.token_bytes import Spell


class TokenByteDecoder:
    """Spells the tokens of one answer, in order."""

    def __init__(
        self, spell: Spell, silent: Collection[int], end_tokens: Collection[int], *, is_continued: bool = False
    ) -> None:
        """`end_tokens` have no text in this answer. `is_continued`: the answer's text continues another text."""
        self._spell = spell
        self._silent = silent
        self._end_tokens = end_tokens
        self._is_first = not is_continued

    def decode(self, token: Token) -> Token:
        """Adds bytes to the logprobs of the next token: its own, and those of the alternatives at this position."""
        if token.logprobs is None:
            return token
        top = tuple(TokenLogprob(one.token_id, one.logprob, self._bytes(one.token_id)) for one in token.logprobs.top)
        text_bytes = replace(token.logprobs, top=top, token_bytes=self._bytes(token.id))
        self._is_first = self._is_first and token.id in self._silent
        return replace(token, logprobs=text_bytes)

    def _bytes(self, token_id: int) -> bytes:
        is_silent = token_id in self._silent or token_id in self._end_tokens
        return b"" if is_silent else self._spell(token_id, self._is_first)
