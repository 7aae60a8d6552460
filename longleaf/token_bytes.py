"""The bytes of single tokens, from the description of a tokenizer."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


class TokenTexts(NamedTuple):
    """The texts of the tokens of a vocabulary."""

    spell: Spell | None
    """Returns the bytes of single ids; None if the text of a token depends on other tokens."""
    silent: frozenset[int]
    """Ids without text: special tokens, and ids without a token."""
    fallback: Mapping[int, int]
    """Ids that stand for a byte of a character without a token, and that byte."""


def read_token_texts(
    tokenizer: "Tokenizer", vocabulary_size: int, decode: Callable[[Sequence[int]], str]
) -> TokenTexts:
    """The texts of the tokens below `vocabulary_size`. `decode` returns the text of ids without special tokens."""
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    unused = set(range(vocabulary_size)) - set(tokenizer.get_vocab().values())
    decoder, silent = decoder_steps(description.get("decoder")), frozenset(special | unused)
    has_fallback = any(step["type"] == "ByteFallback" for step in decoder)
    names = {byte: f"<0x{byte:02X}>" for byte in range(256) if has_fallback}
    found = {byte: tokenizer.token_to_id(name) for byte, name in names.items()}
    fallback = {token_id: byte for byte, token_id in found.items() if token_id is not None}
    spell = byte_decoder_of(decoder, tokenizer.id_to_token, decode, fallback, silent)
    return TokenTexts(spell, silent, fallback)


def decoder_steps(step: object) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as tokenizer.json describes them."""
    if not isinstance(step, dict):
        return []
    fields = cast(dict[str, Any], step)
    if fields["type"] != "Sequence":
        return [fields]
    inner = next(cast(list[object], value) for value in fields.values() if isinstance(value, list))
    return [found for one in inner for found in decoder_steps(one)]
