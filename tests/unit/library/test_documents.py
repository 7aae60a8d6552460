"""Document readers during an upload."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from longleaf.client.documents import UploadSource

NUM_PIECES = 8


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(NUM_PIECES):
        await asyncio.sleep(0)
        yield b"piece"


async def read_all(source: UploadSource) -> int:
    return len([piece async for piece in source.pieces_from(0)])


@pytest.mark.parametrize("num_turns", range(6 * NUM_PIECES))
async def test_reader_can_be_closed_at_any_piece(num_turns: int) -> None:
    source = UploadSource(pieces())
    reader = asyncio.create_task(read_all(source))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await source.aclose()
    await asyncio.wait([reader])
    assert reader.cancelled() or reader.result() <= NUM_PIECES


async def test_document_is_read_to_its_end() -> None:
    assert await read_all(UploadSource(pieces())) == NUM_PIECES
