"""The text of the tokens of a context, for any text and any cuts, forks and appends."""

from array import array
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers

from coordinator.engine_messages import DocumentPart
from coordinator.text.checkpoint import Checkpoint
from coordinator.text.encoder import Encoder, WindowSizes
from coordinator.text.template import DirectRenderer
from coordinator.text.text_map import TextMap
from coordinator.text.token_offsets import TokenOffsets
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import embedded_model
from longleaf.document_text import DocumentText, TextFile
from longleaf.little_endian import pack
from tests.support.service import byte_tokenizer
from tests.support.tokenizers import MERGES, metaspace_tokenizer

SMALL = WindowSizes(usual=200, margin=80)


def composing() -> FastTokenizer:
    tokenizer = byte_tokenizer(MERGES)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


MAKERS: dict[str, Callable[[], FastTokenizer]] = {
    "bytes": lambda: byte_tokenizer(MERGES),
    "embedded": lambda: FastTokenizer.from_file(str(embedded_model() / "tokenizer.json")),
    "fallback": lambda: metaspace_tokenizer(has_bytes=True),
    "composing": composing,
}
OF_BYTES = ("bytes", "embedded")


@cache
def tokenizer_of(name: str) -> Tokenizer:
    checkpoint = replace(Checkpoint.read(embedded_model()), chat_template=None, vocabulary_size=0)
    return Tokenizer(MAKERS[name](), checkpoint, DirectRenderer())


def texts() -> st.SearchStrategy[str]:
    units = st.sampled_from(["a", " ", "\n", "ab", "\r\n", "世", "é", "e\u0301", "🦙", "the "]) | st.text(max_size=3)
    runs = st.tuples(units, st.integers(1, 300)).map(lambda run: run[0] * run[1])
    return st.lists(runs | st.text(max_size=80), max_size=8).map("".join)


def document(name: str, text: str, cuts: list[int], lead: int) -> DocumentPart:
    """A text as it is ingested in these pieces, with so many ids before it."""
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer._plain, [0] * lead, sizes=SMALL, starts=TokenOffsets(lead, tokenizer.alphabet.spell))
    ends = sorted(cut % (len(text) + 1) for cut in cuts)
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        encoder.push(text[start:end])
    encoder.finish()
    assert encoder.starts is not None and encoder.starts.is_whole(len(encoder.token_ids))
    retained = DocumentText(num_lead=lead, starts=pack(encoder.starts.starts).tobytes(), num_bytes=len(text.encode()))
    retained.check(len(encoder.token_ids), "text")
    return DocumentPart(token_ids=encoder.token_ids, num_tokens=len(encoder.token_ids), text=retained)


CUTS = st.lists(st.integers(0, 1 << 20), max_size=4)
PLACE = st.integers(0, 1 << 20)


@pytest.mark.parametrize("name", OF_BYTES)
@given(text=texts(), cuts=CUTS, lead=st.sampled_from([0, 1, 5, 63, 64, 65, 130]), places=st.tuples(PLACE, PLACE))
@settings(max_examples=50, deadline=None)
def test_the_bytes_of_a_span_are_those_of_its_tokens(
    name: str, text: str, cuts: list[int], lead: int, places: tuple[int, int]
) -> None:
    part, data = document(name, text, cuts, lead), text.encode()
    found = TextMap([part], tokenizer_of(name).alphabet)
    assert found.num_bytes == len(data)
    start, end = sorted(place % (part.num_tokens + 1) for place in places)
    reported = found.bytes_of(start, end)
    assert reported is not None
    spell = tokenizer_of(name).alphabet.spell
    assert spell is not None
    assert data[slice(*reported)] == b"".join(spell(each, False) for each in part.token_ids[max(lead, start) : end])
    first, last = found.tokens_of(*reported)
    assert reported[0] == reported[1] or (
        max(start, lead) <= first and last <= end and found.bytes_of(first, last) == reported
    )


@given(
    sizes=st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(1, 9), max_size=4)), min_size=1, max_size=3),
    places=st.tuples(PLACE, PLACE),
)
@settings(max_examples=50, deadline=None)
def test_files_of_bytes_are_those_of_the_first_and_the_last(
    sizes: list[tuple[int, list[int]]], places: tuple[int, int]
) -> None:
    parts, names = list[DocumentPart](), list[str]()
    for number, (num_unnamed, files) in enumerate(sizes):
        part = document("bytes", "x" * (num_unnamed + sum(files)), [], 0)
        names += [""] * num_unnamed
        begun = list[TextFile]()
        for index, size in enumerate(files):
            begun.append(TextFile(f"{number}-{index}", num_unnamed + sum(files[:index])))
            names += [begun[-1].name] * size
        assert part.text is not None
        parts.append(replace(part, text=replace(part.text, files=tuple(begun))))
    found = TextMap(parts, tokenizer_of("bytes").alphabet)
    start, end = sorted(place % (len(names) + 1) for place in places)
    own = names[start:end] or [*names, ""][start : start + 1]
    assert found.file_names(start, end) == (own[0], own[-1] if own[-1] != own[0] else "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MAKERS)
@given(text=texts(), cuts=CUTS, lead=st.sampled_from([0, 3, 64]), places=st.tuples(PLACE, PLACE))
@settings(max_examples=30, deadline=None)
def test_text_is_reported_in_whole_characters(
    name: str, text: str, cuts: list[int], lead: int, places: tuple[int, int]
) -> None:
    part, data = document(name, text, cuts, lead), text.encode()
    found = TextMap([part], tokenizer_of(name).alphabet)
    start, end = sorted(place % (len(data) + 1) for place in places)
    passage = found.read_bytes(start, end)
    assert passage.bytes is not None
    assert 0 <= passage.bytes[0] <= passage.bytes[1] <= len(data)
    if name in OF_BYTES:
        reported = data[slice(*passage.bytes)]
        assert reported == passage.text.encode()
        assert data[start:end] in reported and len(reported) <= end - start + 6
    ends = [found.bytes_of(position, position) for position in range(part.num_tokens + 1)]
    assert ends == sorted(ends) and ends[-1] == (len(data), len(data))  # type: ignore[type-var]


@pytest.mark.parametrize("name", OF_BYTES)
@given(first=texts(), second=texts(), cut=PLACE, cuts=CUTS, has_ids=st.booleans(), is_sent=st.booleans())
@settings(max_examples=30, deadline=None)
def test_forks_and_appends_are_one_text(
    name: str, first: str, second: str, cut: int, cuts: list[int], has_ids: bool, is_sent: bool
) -> None:
    """The beginning of one document, some ids perhaps, and another document behind it."""
    alphabet = tokenizer_of(name).alphabet
    whole, behind = document(name, first, cuts, 2), document(name, second, cuts, 0)
    num_tokens = 1 + cut % whole.num_tokens
    fork = DocumentPart(token_ids=whole.token_ids, num_tokens=num_tokens, text=whole.text)
    if is_sent:  # in an archive
        assert whole.text is not None
        text = whole.text.cut(num_tokens)
        text.check(num_tokens, "text")
        fork = DocumentPart(token_ids=whole.token_ids[:num_tokens], num_tokens=num_tokens, text=text)
    ids = [DocumentPart(token_ids=array("I", [5, 6]), num_tokens=2, text=None)] if has_ids else []
    parts = [fork, *ids, *([behind] if behind.num_tokens else [])]
    found, spell = TextMap(parts, alphabet), alphabet.spell
    assert spell is not None
    used = b"".join(spell(each, False) for each in whole.token_ids[2:num_tokens])
    assert first.encode().startswith(used)
    assert found.num_bytes == len(used) + len(second.encode())
    if has_ids:
        assert found.bytes_of(num_tokens, num_tokens + 1) is None
    if behind.num_tokens:
        assert found.bytes_of(found.num_tokens - behind.num_tokens, found.num_tokens) == (len(used), found.num_bytes)
    assert found.bytes_of(0, num_tokens) == (0, len(used))


@pytest.mark.parametrize("name", MAKERS)
@given(text=texts(), cuts=CUTS, place=PLACE)
@settings(max_examples=30, deadline=None)
def test_lines_are_counted(name: str, text: str, cuts: list[int], place: int) -> None:
    part, data = document(name, text, cuts, 1), text.encode()
    byte = place % (len(data) + 1)
    lines = TextMap([part], tokenizer_of(name).alphabet).lines_at(byte)
    while lines is not None and not lines.is_over:
        lines.step(7)
    if name in OF_BYTES:
        assert (lines.line if lines else 1) == 1 + data.count(b"\n", 0, byte)


@given(text=texts(), cut=PLACE)
@settings(max_examples=30, deadline=None)
def test_another_tokenizer_resumes(text: str, cut: int) -> None:
    name = "bytes"
    tokenizer = tokenizer_of(name)
    whole = document(name, text, [], 2)

    def encoder() -> Encoder:
        return Encoder(tokenizer._plain, [0, 0], sizes=SMALL, starts=TokenOffsets(2, tokenizer.alphabet.spell))

    first, second = encoder(), encoder()
    first.push(text[: cut % (len(text) + 1)])
    assert first.starts is not None and second.starts is not None
    second.resume(first.token_ids[:], first.stable)
    second.starts.resume(first.starts.starts[:], len(first.token_ids))
    second.push(text.encode()[first.stable.num_bytes :].decode())
    second.finish()
    assert whole.text is not None and pack(second.starts.starts).tobytes() == whole.text.starts
