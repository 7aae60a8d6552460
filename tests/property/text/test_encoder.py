"""Ids of a text that arrives in pieces are those of the whole text, for any tokenizer."""

import itertools
import json
import random
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from coordinator.text.encoder import Encoder, WindowSizes
from longleaf.config import embedded_model
from longleaf.errors import InvalidArgument

SYLLABLES = "the an ing er ll ab ba 12 3 a e o 世 界 猫 é ß д ж .".split()
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\p{L}+|\s+|[^\s\p{L}\p{N}]+"
SPACES = normalizers.Replace(" ", "▁")
SMALL = WindowSizes(usual=200, margin=80)


def corpus() -> list[str]:
    """Words that share syllables, so that small vocabularies have merges of several levels."""
    draw = random.Random(7)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(300)]
    lines = [" ".join(draw.choices(words, k=12)) + draw.choice(["\n", "\n\n", "\n    ", "  "]) for _ in range(300)]
    return [*lines, "aaaa aaaaaaaa        ----\n\n\n\n" * 20]


def train(tokenizer: FastTokenizer, trainer: object) -> FastTokenizer:
    tokenizer.train_from_iterator(corpus(), trainer)  # type: ignore[arg-type]
    return tokenizer


def byte_level(pattern: str | None = None, regex: bool = True, prefix: bool = False) -> FastTokenizer:
    tokenizer = FastTokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex and not pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|end|>"]))


def composing() -> FastTokenizer:
    tokenizer = byte_level(LLAMA3)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_byte_fallback(tokenizer: FastTokenizer) -> FastTokenizer:
    """Gives the trained model tokens of single bytes, after all others."""
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if isinstance(vocabulary, dict):
        vocabulary |= {name: len(vocabulary) + i for i, name in enumerate(names)}
    else:
        vocabulary += [[name, -20.0] for name in names]
    description["model"]["byte_fallback"] = True
    return FastTokenizer.from_str(json.dumps(description))


def llama2(*added: str) -> FastTokenizer:
    """SentencePiece as in Llama 2: no words, one merge over the whole text."""
    tokenizer = FastTokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], limit_alphabet=40)
    tokenizer = with_byte_fallback(train(tokenizer, trainer))
    description = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}
    tokenizer = FastTokenizer.from_str(json.dumps(description))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), SPACES])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def metaspace(scheme: str) -> FastTokenizer:
    tokenizer = FastTokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], limit_alphabet=40)
    return with_byte_fallback(train(tokenizer, trainer))


def unigram() -> FastTokenizer:
    tokenizer = FastTokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return with_byte_fallback(train(tokenizer, trainer))


def wordpiece() -> FastTokenizer:
    tokenizer = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return train(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], limit_alphabet=40))


MAKERS: dict[str, Callable[[], FastTokenizer]] = {
    "gpt2": byte_level,
    "prefix": lambda: byte_level(prefix=True),
    "llama3": lambda: byte_level(LLAMA3),
    "right-digits": lambda: byte_level(DIGITS_FROM_THE_RIGHT),
    "composing": composing,
    "wordless": lambda: byte_level(regex=False),
    "llama2": llama2,
    "llama2-added": lambda: llama2("<table>", "\n\n"),
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "embedded": lambda: FastTokenizer.from_file(str(embedded_model() / "tokenizer.json")),
}


@cache
def tokenizer_of(name: str) -> FastTokenizer:
    tokenizer = MAKERS[name]()
    tokenizer.encode_special_tokens = True
    return tokenizer


def texts() -> st.SearchStrategy[str]:
    """Prose, scripts, digits, long runs, combining marks, and text that resembles control tokens."""
    words = st.lists(st.sampled_from(SYLLABLES), min_size=1, max_size=9).map("".join)
    prose = st.lists(words, max_size=40).map(" ".join)
    units = st.sampled_from(["a", " ", "\n", "7", "ab", " \n", "世", "\u0301", "-", "\r\n"])
    runs = st.tuples(units | st.text(min_size=1, max_size=3), st.integers(1, 700)).map(lambda run: run[0] * run[1])
    digits = st.text("0123456789", max_size=600)
    control = st.sampled_from(["<|end|>", "<unk>", "<table>", "<tab", "\n\n", "<0x41>", "[UNK]", "<s>"])
    marks = st.text("e\u0301\u0323\u0334\u0308o가각한", max_size=60)
    parts = st.one_of(prose, runs, digits, control, marks, st.text(max_size=80))
    return st.lists(parts, max_size=9).map("".join)


def encode(encoder: Encoder, text: str, cuts: list[int]) -> None:
    ends = sorted(cut % (len(text) + 1) for cut in cuts)
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        encoder.push(text[start:end])
    encoder.finish()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MAKERS)
@given(text=texts(), cuts=st.lists(st.integers(0, 1 << 20), max_size=4))
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_ids_of_the_whole(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer, sizes=SMALL)
    encoder.record_spans()
    encode(encoder, text, cuts)
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert list(encoder.token_ids) == whole.ids
    assert encoder.spans == whole.offsets


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MAKERS)
@given(text=texts(), cut=st.integers(0, 1 << 20), cuts=st.lists(st.integers(0, 1 << 20), max_size=3))
@settings(max_examples=40, deadline=None)
def test_another_encoder_resumes_from_the_stable_tokens(name: str, text: str, cut: int, cuts: list[int]) -> None:
    tokenizer, cut = tokenizer_of(name), cut % (len(text) + 1)
    first = Encoder(tokenizer, (1, 2), sizes=SMALL)
    first.push(text[:cut])
    second = Encoder(tokenizer, (1, 2), sizes=SMALL)
    second.resume(first.token_ids[:], first.stable)
    encode(second, text.encode()[first.stable.num_bytes :].decode(), cuts)
    assert list(second.token_ids) == [1, 2, *tokenizer.encode(text, add_special_tokens=False).ids]


LOCAL = [name for name in MAKERS if name not in ("unigram", "wordpiece")]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("kind", ["a", " ", "\n", "ab", "世界", "one two "])
def test_an_endless_run_stays_in_one_window(name: str, kind: str) -> None:
    tokenizer = tokenizer_of(name)
    encoder, text = Encoder(tokenizer, sizes=WindowSizes(usual=1000, margin=300)), kind * 5000
    resident = 0
    for start in range(0, len(text), 100):
        encoder.push(text[start : start + 100])
        resident = max(resident, encoder.num_buffered)
    encoder.finish()
    assert list(encoder.token_ids) == tokenizer.encode(text, add_special_tokens=False).ids
    assert resident <= 2000


@pytest.mark.parametrize("name", ["unigram", "wordpiece"])
def test_a_word_that_is_longer_than_the_longest_window_is_refused(name: str) -> None:
    encoder = Encoder(tokenizer_of(name), sizes=WindowSizes(200, 800, 80))
    with pytest.raises(InvalidArgument, match="800 consecutive characters"):
        encoder.push("a" * 1000)


def test_a_window_that_took_long_is_not_made_longer() -> None:
    """Some patterns take time that grows with the square of a run: the next window would take four times as long."""
    seconds = itertools.count(step=2.0)
    encoder = Encoder(tokenizer_of("right-digits"), sizes=SMALL, clock=lambda: next(seconds))
    with pytest.raises(InvalidArgument, match="200 consecutive characters"):
        encoder.push("1" * 1000)


def test_digits_grouped_from_the_end_are_not_cut_before_the_end_is_known() -> None:
    encoder, text = Encoder(tokenizer_of("right-digits"), sizes=SMALL), "1" * 1000 + "x" * 300
    encoder.push(text[:1000])
    assert not encoder.token_ids
    encoder.push(text[1000:])
    encoder.finish()
    assert list(encoder.token_ids) == tokenizer_of("right-digits").encode(text, add_special_tokens=False).ids
