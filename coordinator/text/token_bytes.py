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
"""Decoder steps whose output depends only on the current token, and on whether it is the first one."""
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The characters of byte-level tokens: a printable character is the byte with its number, and the others are
numbered from 256 on."""


def byte_decoder_of(
    decoder: Sequence[Mapping[str, Any]],
    names: Callable[[int], str | None],
    decode: Callable[[Sequence[int]], str],
    fallback: Mapping[int, int],
    silent: Collection[int],
) -> Spell | None:
    """Return the function that spells tokens like a decoder with these steps; None if the text of a token depends on
    other tokens.

    `fallback` maps ids that stand for a byte to the byte. `silent` ids have no text.
    """
    kinds = [step["type"] for step in decoder]
    if kinds == ["ByteLevel"]:
        return cache(_byte_level(names))
    if set(kinds) <= _TOKENWISE and all(_is_narrow(decoder, i) for i in range(len(kinds))):
        return cache(_by_text(decode, fallback, silent))
    return None


def _is_narrow(decoder: Sequence[Mapping[str, Any]], place: int) -> bool:
    """Whether a step that strips characters strips at most the first one of the whole text."""
    step, before = decoder[place], [other["type"] for other in decoder[:place]]
    return step["type"] != "Strip" or ("Fuse" in before and step["start"] <= 1 and step["stop"] == 0)


def _byte_level(names: Callable[[int], str | None]) -> Spell:
    def spell(token_id: int, _: bool) -> bytes:
        name = names(token_id) or ""
        # An added token may have other characters: it is its own text.
        known = all(letter in BYTE_LEVEL for letter in name)
        return bytes(BYTE_LEVEL[letter] for letter in name) if known else name.encode()

    return spell


def _by_text(decode: Callable[[Sequence[int]], str], fallback: Mapping[int, int], silent: Collection[int]) -> Spell:
    """Spells a token as the bytes that it adds to a text, which is empty or the text of one other token."""

    def spell(token_id: int, is_first: bool) -> bytes:
        before = () if is_first else (anchor,)
        text = decode([*before, token_id])[len(decode(before)) :]
        return bytes([fallback[token_id]]) if text and token_id in fallback else text.encode()

    anchor = _anchor(decode, {*fallback, *silent})
    return spell


def _anchor(decode: Callable[[Sequence[int]], str], others: Collection[int]) -> int:
    """An id that has text and is not in `others`."""
    candidates = (token_id for token_id in range(len(others) + 4096) if token_id not in others)
    return next((token_id for token_id in candidates if decode([token_id]).strip()), 0)


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

    def take(self, token: Token) -> Token:
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
