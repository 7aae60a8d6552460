"""The text of contexts over the wire."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from longleaf.client import AsyncClient
from longleaf.client.files import files_of
from longleaf.document_text import MAX_FILE_NAME, MAX_FILES, TextFile
from longleaf.errors import FailedPrecondition, InvalidArgument, NotFound
from longleaf.types import ContextText
from tests.support.service import TEXT, FakeEngine, serving


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with serving(engine, tmp_path / "model") as (_, address), AsyncClient(address) as client:
        yield client


FIRST, SECOND = f"{TEXT}\n{TEXT}\n".encode(), "one\ntwo 世\nthree".encode()


@pytest.fixture
async def files(client: AsyncClient, tmp_path: Path) -> list[Path]:
    """Two files that are ingested as one text."""
    paths = [tmp_path / "a.txt", tmp_path / "empty.txt", tmp_path / "b.txt"]
    for path, content in zip(paths, (FIRST, b"", SECOND), strict=True):
        path.write_bytes(content)
    await client.ingest("book", paths)
    return paths


async def test_bytes_are_reported_with_their_file_and_line(client: AsyncClient, files: list[Path]) -> None:
    start = len(FIRST) + SECOND.index(b"two")
    text = await client.get_context_text("book", byte_start=start, byte_end=start + 3)
    assert (text.text, text.file, text.line) == ("two", str(files[2]), 2)
    assert (text.byte_start, text.byte_end) == (start, start + 3)
    again = await client.get_context_text("book", text.token_start, text.token_end)
    assert again == text, "the model's tokens are bytes"
    inside = start + 5
    text = await client.get_context_text("book", byte_start=inside, byte_end=inside + 1)
    assert (text.text, text.byte_start, text.byte_end) == ("世", inside - 1, inside + 2), "characters are whole"
    text = await client.get_context_text("book", byte_start=0, byte_end=len(FIRST) + len(SECOND))
    assert text.text.encode() == FIRST + SECOND
    assert (text.file, text.line) == (str(files[0]), 1)


async def test_template_tokens_have_no_bytes(client: AsyncClient, files: list[Path], engine: FakeEngine) -> None:
    num_tokens = len(engine.contexts["book"])
    text = await client.get_context_text("book", 0, num_tokens)
    assert text.text.encode() == FIRST + SECOND
    assert (text.byte_start, text.byte_end) == (0, len(FIRST) + len(SECOND))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "range"),
        ({"token_start": 1}, "range"),
        ({"token_start": 1, "token_end": 2, "byte_start": 1, "byte_end": 2}, "range"),
        ({"token_start": 2, "token_end": 1}, "token_range"),
        ({"token_start": -1, "token_end": 1}, "token_range"),
        ({"token_start": 0, "token_end": 10_000}, "token_range"),
        ({"byte_start": 0, "byte_end": 10_000}, "byte_range"),
        ({"byte_start": 5, "byte_end": 4}, "byte_range"),
    ],
)
async def test_invalid_ranges_are_refused(
    client: AsyncClient, files: list[Path], given: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.get_context_text("book", **given)  # type: ignore[arg-type]
    assert refused.value.field == field


async def test_long_ranges_are_refused(client: AsyncClient, engine: FakeEngine) -> None:
    engine.contexts["long"] = [65] * (1 << 19)
    with pytest.raises(InvalidArgument, match="the limit for one call is 262,144"):
        await client.get_context_text("long", 0, 1 << 19)


async def test_contexts_of_ids_have_text_and_no_bytes(client: AsyncClient, engine: FakeEngine) -> None:
    await client.ingest("ids", (await client.tokenize("four words of text")).token_ids)
    text = await client.get_context_text("ids", 0, 4)
    assert text == ContextText(text="four", token_start=0, token_end=4)
    with pytest.raises(FailedPrecondition, match="ingested as token ids"):
        await client.get_context_text("ids", byte_start=0, byte_end=1)
    with pytest.raises(NotFound):
        await client.get_context_text("nowhere", 0, 4)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ([TextFile("a", 4), TextFile("b", 4)], "config.files[1].byte_start"),
        ([TextFile("a", -1)], "config.files[0].byte_start"),
        ([TextFile("a", 0), TextFile("b", 100)], "config.files[1].byte_start"),
        ([TextFile("ä" * (MAX_FILE_NAME // 2) + "x", 0)], "config.files[0].name"),
        ([TextFile("", i) for i in range(MAX_FILES + 1)], "config.files"),
    ],
)
async def test_invalid_files_are_refused(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, wrong: list[TextFile], field: str
) -> None:
    monkeypatch.setattr("longleaf.client.upload.files_of", lambda _: tuple(wrong))
    with pytest.raises(InvalidArgument) as refused:
        await client.ingest("book", "some text")
    assert refused.value.field == field


async def test_maximum_number_of_files_is_accepted(
    client: AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(TextFile(f"{i:x}.c", i) for i in range(MAX_FILES))
    monkeypatch.setattr("longleaf.client.upload.files_of", lambda _: many)
    engine.max_positions = 1 << 20
    await client.ingest("book", b"x" * MAX_FILES)
    assert (await client.get_context_text("book", byte_start=77, byte_end=78)).file == "4d.c"


def test_files_start_at_their_parts(tmp_path: Path) -> None:
    path, empty = tmp_path / "a.txt", tmp_path / "empty.txt"
    path.write_bytes(b"12345")
    empty.write_bytes(b"")
    assert files_of(path) == (TextFile(str(path), 0),)
    assert files_of([empty, "ab", path, b"--", path]) == (
        TextFile(str(path), 2),
        TextFile("", 7),
        TextFile(str(path), 9),
    )
    with path.open("rb") as stream:
        assert files_of([path, stream]) == (TextFile(str(path), 0), TextFile(str(path), 5))
        assert files_of([stream, path]) == (), "where the second begins is not known"
    assert files_of("text") == files_of(["a", "b"]) == files_of([1, 2, 3]) == files_of(iter([path])) == ()
