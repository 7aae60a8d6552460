"""The bytes of an answer's tokens, joined, are the bytes of its text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders as decoding

from coordinator import engine_messages
from coordinator.handlers.response_assembler import ResponseAssembler
from coordinator.text.detokenizer import Alphabet
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import embedded_model
from longleaf.sampling import Logprobs, Sampling, Token, TokenLogprob
from longleaf.types import Delta, Generate
from tests.support.service import byte_tokenizer, write_model
from tests.support.tokenizers import MERGES, metaspace_tokenizer

WORDS = ("a", "##b", "▁a", "▁", "▁▁", ".", " .", "é", "世", "\ufffd", "don", "'", "t")
ADDED = (
    AddedToken("<tool>"),
    AddedToken("▁x y"),
    AddedToken("é"),
    AddedToken("世界"),
    AddedToken("<|sly|>", special=True),
)


def words(*decoders: decoding.Decoder) -> FastTokenizer:
    """Whole words, and bytes for all else."""
    names = [*WORDS, *(f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x80, 0xA9, 0xC3, 0xF0))]
    tokenizer = FastTokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    if decoders:
        tokenizer.decoder = decoders[0] if len(decoders) == 1 else decoding.Sequence(list(decoders))
    return tokenizer


def with_added(tokenizer: FastTokenizer) -> FastTokenizer:
    tokenizer.add_tokens(list(ADDED))
    return tokenizer


SPACES = decoding.Replace("▁", " ")
MAKERS: dict[str, Callable[[], FastTokenizer]] = {
    "bytes": lambda: byte_tokenizer(MERGES),
    "added": lambda: with_added(byte_tokenizer(MERGES)),
    "metaspace": lambda: with_added(metaspace_tokenizer(has_bytes=False)),
    "fallback": lambda: with_added(metaspace_tokenizer(has_bytes=True)),
    "gemma": lambda: words(SPACES, decoding.ByteFallback(), decoding.Fuse()),
    "llama": lambda: with_added(words(SPACES, decoding.ByteFallback(), decoding.Fuse(), decoding.Strip(" ", 1, 0))),
    "never": lambda: words(decoding.Metaspace(prepend_scheme="never")),
    "wordpiece": lambda: words(decoding.WordPiece()),
    "none": words,
}

BYTE_LEVEL = ("bytes", "added", "embedded")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        name: Tokenizer.load(write_model(folder / name, make(), None), DirectRenderer())
        for name, make in MAKERS.items()
    }
    return made | {"embedded": Tokenizer.load(embedded_model(), DirectRenderer())}


def joined(alphabet: Alphabet, token_ids: list[int], end_tokens: frozenset[int] = frozenset()) -> tuple[bytes, str]:
    """The bytes in the logprobs of an answer of these ids, and its text."""
    request = Generate(input="", sampling=Sampling(num_logprobs=1), with_token_bytes=True)
    answer = ResponseAssembler("id", request, alphabet, end_tokens, lambda: 0.0, exactness_note="")
    reported = [Token(token_id, Logprobs(-1.0, (TokenLogprob(token_id, -1.0),))) for token_id in token_ids]
    output = [engine_messages.Tokens(i, (token,)) for i, token in enumerate(reported)]
    found = [m for event in [*output, engine_messages.Ended("length", 1, 0, 1, 0, 0, 0)] for m in answer.take(event)]
    deltas = [message for message in found if isinstance(message, Delta)]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert len(entries) == len([i for delta in deltas for i in delta.token_ids])
    parts = [entry.token_bytes for entry in entries]
    assert parts == [entry.top[0].token_bytes for entry in entries]  # the same token at the same place
    return b"".join(part for part in parts if part is not None), "".join(delta.text for delta in deltas)


IDS = st.integers(0, 600) | st.integers(-12, -1)
"""Negative ones are the last of the vocabulary, where added tokens are."""


@given(st.sampled_from([*MAKERS, "embedded"]), st.lists(IDS, max_size=40))
@example("llama", [3, 2])
@example("llama", [14, 2])
@example("metaspace", [11, 4])
@settings(max_examples=600, deadline=None)
def test_the_bytes_of_the_tokens_are_those_of_the_text(
    tokenizers: dict[str, Tokenizer], name: str, token_ids: list[int]
) -> None:
    tokenizer = tokenizers[name]
    known = [token_id % tokenizer.vocabulary_size for token_id in token_ids]
    data, text = joined(tokenizer.alphabet, known)
    assert text == tokenizer.decode(known)
    try:
        assert data.decode() == text
    except UnicodeDecodeError:
        assert "\ufffd" in text  # the text does not determine the bytes
        if name in BYTE_LEVEL:
            assert data.decode(errors="replace") == text


@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_the_bytes_of_a_text_come_back(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """Characters that take several tokens are whole again."""
    for name in ("bytes", "embedded"):
        tokenizer = tokenizers[name]
        encoder = tokenizer.plain_encoder(False)
        encoder.push(text)
        encoder.finish()
        assert joined(tokenizer.alphabet, list(encoder.token_ids)) == (text.encode(), text)


def test_a_token_that_ends_the_answer_has_no_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        data, text = joined(tokenizer.alphabet, [0, 1, 2], frozenset({2}))
        assert data == text.encode()


@pytest.mark.parametrize(
    "decoder",
    [
        decoding.BPEDecoder(),
        decoding.CTC(),
        decoding.Strip(" ", 1, 0),
        decoding.Sequence([decoding.Fuse(), decoding.Strip(" ", 0, 1)]),
        decoding.Sequence([decoding.Fuse(), decoding.Strip(" ", 2, 0)]),
        decoding.Sequence([decoding.ByteLevel(), decoding.Fuse()]),
    ],
    ids=["suffixes", "repeated", "each stripped", "stripped at the end", "stripped far", "not alone"],
)
def test_where_tokens_are_made_text_together_none_has_bytes_of_its_own(
    decoder: decoding.Decoder, tmp_path: Path
) -> None:
    assert Tokenizer.load(write_model(tmp_path, words(decoder), None), DirectRenderer()).alphabet.spell is None


def test_no_bytes_are_made_without_a_request() -> None:
    def spell(token_id: int, is_first: bool) -> bytes:
        raise AssertionError("nobody asked")

    alphabet = Alphabet(decode=lambda token_ids: "x" * len(token_ids), spell=spell)
    request = Generate(input="", sampling=Sampling(num_logprobs=1))
    answer = ResponseAssembler("id", request, alphabet, frozenset(), lambda: 0.0, exactness_note="")
    [delta] = answer.take(engine_messages.Tokens(0, (Token(5, Logprobs(-1.0, (TokenLogprob(5, -1.0),))),)))
    assert isinstance(delta, Delta)
    assert (delta.logprobs[0].token_bytes, delta.logprobs[0].top[0].token_bytes) == (None, None)
