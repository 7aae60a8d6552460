"""Documents with a system message before them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.handlers.durable_uploads import DurableUploads
from coordinator.handlers.ingest import Ingest
from coordinator.handlers.uploads import Uploads
from coordinator.persistence.catalog.catalog import Catalog
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import InvalidArgument
from longleaf.types import IngestHeader, IngestPiece
from tests.support.chat_templates import CHATML, FOLDING, GEMMA, MISTRAL, chat_tokenizer
from tests.support.service import END, FakeEngine, load_tokenizer, write_model

pytestmark = pytest.mark.timeout(60)

FAST = chat_tokenizer()
FIELD = "prefaced_config.system"
SYSTEM = f"Speak like a whaler. {END}<|im_start|>"
TEXT = ("Call me Ishmael. Some years ago, never mind how long precisely. \U0001f433 " * 6_000).encode()


class UploadService:
    """The ingests of a service."""

    def __init__(self, folder: Path, template: str | None, catalog: Catalog, durable: DurableUploads) -> None:
        self.engine = FakeEngine()
        self.engine.max_positions = self.engine.total_tokens = 1 << 23
        self.tokenizer = load_tokenizer(write_model(folder / "model", chat_tokenizer(), template))
        self.threads = TokenizerPool()
        self.catalog, self.durable = catalog, durable
        self.ingest = Ingest(self.engine, self.tokenizer, self.threads, Uploads(durable=durable))

    async def run(self, *pieces: IngestPiece, breaks_after: int | None = None) -> list[int]:
        """The context, or None if the stream breaks after this number of bytes."""

        async def stream() -> AsyncIterator[IngestPiece]:
            for piece in pieces:
                yield piece

        async for report in self.ingest.run(stream()):
            if breaks_after is not None and report.received_bytes >= breaks_after:
                return []
        return self.engine.contexts[pieces[0].context]  # type: ignore[union-attr]

    async def received(self, header: IngestHeader) -> int:
        """Offset that the service reports to a resumed stream."""

        async def stream() -> AsyncIterator[IngestPiece]:
            yield header

        async for report in self.ingest.run(stream()):
            return report.received_bytes
        raise AssertionError


@asynccontextmanager
async def serving(folder: Path, template: str | None = CHATML) -> AsyncIterator[UploadService]:
    """The ingests of a service for the block; only the catalog survives it."""
    catalog = await Catalog.open(folder / "catalog.db")
    retained = DurableUploads(catalog, (await catalog.load()).uploads)
    found = UploadService(folder, template, catalog, retained)
    try:
        yield found
    finally:
        await retained.close()
        await found.threads.close()
        await catalog.close()


def cut(data: bytes, size: int = 1 << 16) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def control(text: str) -> list[int]:
    return FAST.encode(text, add_special_tokens=False).ids


def plain(text: str) -> list[int]:
    fast = chat_tokenizer()
    fast.encode_special_tokens = True
    return fast.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (CHATML, "<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"),
        (FOLDING, "<|begin|><start_of_turn>user\n", "\n\n"),
        (MISTRAL, "<|begin|>[INST]", "\n\n"),
    ],
)
async def test_template_places_the_system_message_before_the_document(
    template: str, before: str, after: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, template) as one:
        found = await one.run(IngestHeader("moby", system=SYSTEM), b"Call me Ishmael.")
        assert found == [*control(before), *plain(SYSTEM), *control(after), *plain("Call me Ishmael.")]


CHANGES_THE_END = CHATML + "{% if messages[0].role == 'system' %}Obey: {% endif %}"


@pytest.mark.parametrize("template", [None, GEMMA, CHANGES_THE_END], ids=["none", "gemma", "end"])
async def test_template_without_a_system_message_is_refused_immediately(template: str | None, tmp_path: Path) -> None:
    async def nothing() -> AsyncIterator[IngestPiece]:
        yield IngestHeader("moby", system=SYSTEM)
        raise AssertionError("read on")

    async with serving(tmp_path, template) as one:
        with pytest.raises(InvalidArgument) as caught:
            async for _ in one.ingest.run(nothing()):
                pass
        assert caught.value.field == FIELD
        assert await one.run(IngestHeader("moby"), b"Call me Ishmael.")


async def test_system_message_counts_toward_the_size_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        one.engine.max_positions = 100
        with pytest.raises(InvalidArgument) as caught:
            await one.run(IngestHeader("moby", system="ab " * 50), b"x")
        assert caught.value.field == FIELD
        with pytest.raises(InvalidArgument, match=f"{FIELD}: 9,000 bytes do not fit"):
            await one.run(IngestHeader("moby", system="ab " * 3000), b"x")
        with pytest.raises(InvalidArgument) as caught:
            await one.run(IngestHeader("moby", system="ab " * 20), b"1" * 60)
        assert caught.value.field == "text"
        assert await one.run(IngestHeader("moby"), b"1" * 60)


async def test_system_message_with_token_ids_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        with pytest.raises(InvalidArgument) as caught:
            await one.run(IngestHeader("moby", system=SYSTEM), [1, 2, 3])
        assert caught.value.field == FIELD
        assert "moby" not in one.engine.contexts


async def test_upload_resumes_only_with_the_same_system_message(tmp_path: Path) -> None:
    header = IngestHeader("moby", upload_id="mine", system=SYSTEM)
    async with serving(tmp_path) as one:
        expected = await one.run(IngestHeader("whole", system=SYSTEM), *cut(TEXT))
        await one.run(header, *cut(TEXT), breaks_after=150_000)
        offset = await one.received(header)
        assert offset > 150_000
        for other in ("", "Speak."):
            with pytest.raises(InvalidArgument) as caught:
                await one.received(IngestHeader("moby", upload_id="mine", system=other))
            assert caught.value.field == FIELD
        assert await one.run(header, *cut(TEXT[offset:])) == expected


async def test_durable_upload_resumes_in_another_service(tmp_path: Path) -> None:
    header = IngestHeader("moby", upload_id="mine", system=SYSTEM)
    async with serving(tmp_path) as one:
        expected = await one.run(IngestHeader("whole", system=SYSTEM), *cut(TEXT))
        await one.run(header, *cut(TEXT), breaks_after=150_000)
    async with serving(tmp_path) as one:
        for other in ("", "Speak."):
            with pytest.raises(InvalidArgument) as caught:
                await one.received(IngestHeader("moby", upload_id="mine", system=other))
            assert caught.value.field == FIELD
        offset = await one.received(header)
        assert offset > 0
        assert await one.run(header, *cut(TEXT[offset:])) == expected
