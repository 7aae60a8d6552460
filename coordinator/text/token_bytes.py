"""The bytes of single tokens. The joined bytes of an answer's tokens are the bytes of its text, even where the text is
ambiguous: a character may span several tokens, and invalid UTF-8 is shown as U+FFFD."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec.structs import replace

from longleaf.sampling import Token, TokenLogprob

Spell = Callable[[int, bool], bytes]
"""The bytes of an id that has text; the flag marks the first such id of an answer."""
_TOKENWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
"""Steps of a decoder to which no token matters but the one at hand, and whether it is the first."""
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The characters of byte-level tokens: printed ones are the bytes of their numbers, the others follow from 256 on."""


def byte_decoder_of(
    decoder: Sequence[Mapping[str, Any]],
    names: Callable[[int], str | None],
    decode: Callable[[Sequence[int]], str],
    fallback: Mapping[int, int],
    silent: Collection[int],
) -> Spell | None:
    """How tokens are spelled by a decoder of these steps; None when it makes text of tokens together.

    `fallback` are the bytes of ids that stand for one; `silent` ids have no text.
    """
    kinds = [step["type"] for step in decoder]
    if kinds == ["ByteLevel"]:
        return cache(_byte_level(names))
    if set(kinds) <= _TOKENWISE and all(_is_narrow(decoder, i) for i in range(len(kinds))):
        return cache(_by_text(decode, fallback, silent))
    return None


def _is_narrow(decoder: Sequence[Mapping[str, Any]], place: int) -> bool:
    """Whether a step that takes characters away takes at most the first of the whole text."""
    step, before = decoder[place], [other["type"] for other in decoder[:place]]
    return step["type"] != "Strip" or ("Fuse" in before and step["start"] <= 1 and step["stop"] == 0)


def _byte_level(names: Callable[[int], str | None]) -> Spell:
    def spell(token_id: int, _: bool) -> bytes:
        name = names(token_id) or ""
        known = all(letter in BYTE_LEVEL for letter in name)  # an added token may have others, and stands for itself
        return bytes(BYTE_LEVEL[letter] for letter in name) if known else name.encode()

    return spell


def _by_text(decode: Callable[[Sequence[int]], str], fallback: Mapping[int, int], silent: Collection[int]) -> Spell:
    """The bytes of a token are those that it adds to a text: an empty one, or that of another token."""

    def spell(token_id: int, is_first: bool) -> bytes:
        before = () if is_first else (anchor,)
        text = decode([*before, token_id])[len(decode(before)) :]
        return bytes([fallback[token_id]]) if text and token_id in fallback else text.encode()

    anchor = _anchor(decode, {*fallback, *silent})
    return spell


def _anchor(decode: Callable[[Sequence[int]], str], others: Collection[int]) -> int:
    """An id that is text, and none of `others`."""
    candidates = (token_id for token_id in range(len(others) + 4096) if token_id not in others)
    return next((token_id for token_id in candidates if decode([token_id]).strip()), 0)


class TokenByteDecoder:
    """Spells the tokens of one answer, in their order."""

    def __init__(
        self, spell: Spell, silent: Collection[int], end_tokens: Collection[int], *, is_continued: bool = False
    ) -> None:
        """`end_tokens` have no text in this answer. `is_continued`: the answer's text continues another text."""
        self._spell = spell
        self._silent = silent
        self._end_tokens = end_tokens
        self._is_first = not is_continued

    def take(self, token: Token) -> Token:
        """The next token: its logprobs with its bytes, and with those that the others would have had there."""
        if token.logprobs is None:
            return token
        top = tuple(TokenLogprob(one.token_id, one.logprob, self._bytes(one.token_id)) for one in token.logprobs.top)
        text_bytes = replace(token.logprobs, top=top, token_bytes=self._bytes(token.id))
        self._is_first = self._is_first and token.id in self._silent
        return replace(token, logprobs=text_bytes)

    def _bytes(self, token_id: int) -> bytes:
        is_silent = token_id in self._silent or token_id in self._end_tokens
        return b"" if is_silent else self._spell(token_id, self._is_first)
