"""Text that streams equals text that is decoded at once, and no piece shows half a character or a stop string."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from coordinator.text.detokenizer import MAX_OPEN_TOKENS, MAX_SILENT_TOKENS, Alphabet, TextStream
from coordinator.text.stop_strings import StopMatch, StopStrings
from tests.support.service import byte_tokenizer
from tests.support.tokenizers import MERGES, metaspace_tokenizer


def alphabet_of(tokenizer: FastTokenizer) -> Alphabet:
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    fallback = {i for name, i in tokenizer.get_vocab().items() if name.startswith("<0x")}
    return Alphabet(
        decode=lambda ids: tokenizer.decode(list(ids)), silent=frozenset(special), bytes=frozenset(fallback)
    )


TOKENIZERS = {
    "bytes": byte_tokenizer(MERGES),
    "metaspace": metaspace_tokenizer(has_bytes=False),
    "fallback": metaspace_tokenizer(has_bytes=True),
}
IDS = {
    name: st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60)
    for name, tokenizer in TOKENIZERS.items()
}
cases = st.sampled_from(sorted(TOKENIZERS)).flatmap(lambda name: st.tuples(st.just(name), IDS[name]))


Piece = tuple[int, str]
"""A number of ids and their text."""


def stream(alphabet: Alphabet, token_ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[Piece], str]:
    text = TextStream(alphabet, stops)
    pieces: list[Piece] = []
    for token_id in token_ids:
        pieces.append(text.push(token_id))
        if text.matched_stop:
            return pieces, text.matched_stop
    pieces.append(text.finish())
    return pieces, text.matched_stop


def text_of(pieces: list[Piece]) -> str:
    return "".join(text for _, text in pieces)


@given(cases)
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole_text_and_to_all_ids(case: tuple[str, list[int]]) -> None:
    name, token_ids = case
    pieces, _ = stream(alphabet_of(TOKENIZERS[name]), token_ids)
    assert text_of(pieces) == TOKENIZERS[name].decode(token_ids)
    assert sum(num_ids for num_ids, _ in pieces) == len(token_ids)
    assert all(num_ids for num_ids, text in pieces if text)


@pytest.mark.parametrize("begin", ["", "é", "\N{SNOWMAN}"])
def test_tokens_without_text_do_not_pile_up(begin: str) -> None:
    """For an answer that ignores its end token; the data of each token must not accumulate."""
    tokenizer = TOKENIZERS["bytes"]
    [silent, *_] = alphabet_of(tokenizer).silent
    text = TextStream(alphabet_of(tokenizer), ("stop",))
    token_ids = [*tokenizer.encode(begin).ids[:1], *[silent] * 3000]
    sizes = [text.push(token_id)[0] for token_id in token_ids]
    assert max(sizes) <= MAX_SILENT_TOKENS
    assert sum(sizes) >= 3000 - MAX_SILENT_TOKENS


def test_a_long_run_of_bytes_does_not_pile_up() -> None:
    tokenizer = TOKENIZERS["fallback"]
    token_ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦙é".encode() * 300]
    pieces, _ = stream(alphabet_of(tokenizer), token_ids)
    assert text_of(pieces) == "🦙é" * 300
    assert max(num_ids for num_ids, _ in pieces) <= MAX_SILENT_TOKENS


@given(st.text(max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_valid_text_is_never_split_inside_a_character(text: str, rng: random.Random) -> None:
    alphabet = alphabet_of(TOKENIZERS["bytes"])
    pieces, _ = stream(alphabet, TOKENIZERS["bytes"].encode(text).ids)
    assert text_of(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in text for _, text in pieces)


@given(cases, st.lists(st.text("ab é世\ufffd", min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_the_stop_string_that_is_complete_first_ends_the_text(case: tuple[str, list[int]], stops: list[str]) -> None:
    name, token_ids = case
    whole = TOKENIZERS[name].decode(token_ids)
    pieces, matched = stream(alphabet_of(TOKENIZERS[name]), token_ids, tuple(stops))
    text = text_of(pieces)
    ends = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    if not ends:
        assert (text, matched) == (whole, "")
    else:
        _, start, stop = min(ends)
        assert (text, matched) == (whole[:start], stop)
    assert sum(num_ids for num_ids, _ in pieces) <= len(token_ids)


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_strings_are_found_in_pieces_as_in_the_whole(pieces: list[str], stops: list[str]) -> None:
    search, text = StopStrings(stops), ""
    for piece in pieces:
        match = search.push(piece)
        text += piece
        found = [StopMatch(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
        assert match == min(found, default=None)
        if match:
            return
        pending = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        assert search.num_pending == max(pending, default=0)


class CountedText(str):
    """A stop string that counts how often its characters are looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> str:
        CountedText.num_looks += 1
        return super().__getitem__(index)


def test_a_character_costs_the_same_however_long_the_stop_string_is() -> None:
    looks = list[int]()
    for size in (10, 1000):
        search = StopStrings([CountedText("a" * size + "b")])
        search.push("a")
        CountedText.num_looks = 0
        for _ in range(5000):
            assert search.push("a") is None
        looks.append(CountedText.num_looks)
        assert search.num_pending == size
    assert max(looks) < 5 * 5000


@pytest.mark.parametrize("byte", [0x80, 0xC3, 0xF0])
def test_a_run_of_broken_bytes_does_not_pile_up(byte: int) -> None:
    """However long, it is settled piece by piece: decoding stays linear, and clients see that something comes."""
    tokenizer = TOKENIZERS["bytes"]
    token_id = tokenizer.token_to_id({0x80: "Ģ", 0xC3: "Ã", 0xF0: "ð"}[byte])
    longest = 0

    def decode(token_ids: object) -> str:
        nonlocal longest
        ids = list(token_ids)  # type: ignore[call-overload]
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    alphabet = Alphabet(decode=decode)
    pieces, _ = stream(alphabet, [token_id] * 500)
    assert text_of(pieces) == tokenizer.decode([token_id] * 500)
    assert longest <= 3 * MAX_OPEN_TOKENS


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["bytes"]
    text = TextStream(alphabet_of(tokenizer), ("stop",))
    reported = [text.push(token_id) for token_id in tokenizer.encode("é, st").ids]
    assert reported == [(1, "é"), (1, ","), (1, " "), (0, ""), (0, "")]
    assert text.finish() == (2, "st")
