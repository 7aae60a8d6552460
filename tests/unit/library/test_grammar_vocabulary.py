"""The vocabulary that grammars match, read from the tokenizers of different families."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders

from longleaf.errors import ModelRefused
from longleaf.grammars.matcher import OPTIONS, GrammarMatcher
from longleaf.grammars.vocabulary import make_vocabulary, read_vocabulary
from tests.support.sentencepiece import sentencepiece_tokenizer
from tests.support.service import byte_tokenizer


def saved(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def allowed(folder: Path, pattern: str) -> set[str]:
    """The names of the tokens that may begin an answer."""
    vocabulary = read_vocabulary(folder)
    mask = GrammarMatcher(vocabulary, f"start: /{pattern}/{OPTIONS}", []).allowed(vocabulary.size)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {str(tokenizer.id_to_token(token_id)) for token_id in mask.nonzero()[0].tolist()}


def test_byte_level_tokens(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_tokenizer([("Ã", "©"), ("Ġ", "a")]))
    assert allowed(folder, "é+ ") == {"Ã", "Ã©"}
    assert allowed(folder, " a") == {"Ġ", "Ġa"}
    assert allowed(folder, "<\\|end\\|>") == {"<"}, "a special token has no text"


@pytest.mark.parametrize("space", ["prepend", "always", "first"])
def test_tokens_in_the_manner_of_sentencepiece(tmp_path: Path, space: str) -> None:
    folder = saved(tmp_path, sentencepiece_tokenizer(space))
    assert allowed(folder, "Hi there") == {"H", "Hi", "<0x48>"}
    assert allowed(folder, " Hi") == {"▁", "▁H", "▁Hi", "<0x20>"}
    assert allowed(folder, "世") == {"<0xE4>"}


def test_tokens_without_separate_texts_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ModelRefused, match="makes text of its tokens together only"):
        read_vocabulary(saved(tmp_path, tokenizer))


def test_pattern_that_becomes_too_complex_ends_with_an_error() -> None:
    """The limits bound its states, and a matcher after an error allows nothing."""
    vocabulary = make_vocabulary([bytes([byte]) for byte in range(256)], [])
    matcher = GrammarMatcher(vocabulary, f"start: /(a{{1,1000}}){{1,1000}}/{OPTIONS}", [])
    for _ in range(5000):
        if not matcher.allowed(256).any():
            break
        matcher.accept(ord("a"))
    assert matcher.error == "lexer error: too many expressions constructed"
    assert not matcher.allowed(256).any()
