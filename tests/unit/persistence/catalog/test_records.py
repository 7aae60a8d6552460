"""Paths of persisted contexts, chunks of token ids, and the error for each SQLite error."""

import sqlite3
from array import array
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.persistence.catalog import row_codec, tables
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.sqlite_errors import runtime_error, startup_error
from longleaf.errors import CatalogError, DataLoss, StorageUnavailable
from tests.support.catalog import FIRST, context, ids, segment

CATALOG = CatalogContents(segments=FIRST.segments, contexts=FIRST.contexts, service_id="")


def test_path_starts_at_position_0() -> None:
    moby, fork = FIRST.contexts
    first, second = FIRST.segments
    assert CATALOG.path(moby) == (first,)
    assert CATALOG.path(fork) == (first, second)


@pytest.mark.parametrize(
    ("retained", "reason"),
    [
        (replace(CATALOG, segments=FIRST.segments[1:], damaged={4: "its ids are gone"}), "its ids are gone"),
        (replace(CATALOG, segments=FIRST.segments[1:]), "segment 4 is missing, or ends too early"),
        (replace(CATALOG, segments=(segment(4, 49), FIRST.segments[1])), "segment 4 is missing, or ends too early"),
        (
            replace(CATALOG, segments=(FIRST.segments[0], segment(7, 20, parent=4, start=50))),
            "segment 7 is missing, or ends too early",
        ),
        (replace(CATALOG, segments=(FIRST.segments[0], segment(7, 30, start=50))), "does not begin at position 0"),
    ],
)
def test_path_with_a_damaged_segment_is_an_error(retained: CatalogContents, reason: str) -> None:
    with pytest.raises(DataLoss, match=f"contexts/fork is damaged: .*{reason}.*delete it"):
        retained.path(FIRST.contexts[1])


def test_ids_are_split_into_chunks_and_joined() -> None:
    token_ids = ids(0, 2 * row_codec.PIECE_IDS + 7)
    pieces = list(row_codec.piece_rows(tables.segment_ids, {"segment": 3}, token_ids))
    assert [(piece["start"], len(piece["content"])) for piece in pieces] == [
        (0, 1 << 18),
        (1 << 16, 1 << 18),
        (1 << 17, 28),
    ]
    assert pieces[0]["content"][:4] == token_ids[0].to_bytes(4, "little")
    assert row_codec.join_chunks(tables.segment_ids, pieces, len(token_ids)) == token_ids
    for spoilt in ([pieces[1], pieces[0], pieces[2]], pieces[1:], [{**pieces[0], "segment": 4}, *pieces[1:]]):
        with pytest.raises(ValueError, match="from 0 on are damaged"):
            row_codec.join_chunks(tables.segment_ids, spoilt, len(token_ids))
    with pytest.raises(ValueError, match="expected 131,079 token ids, found 131,072"):
        row_codec.join_chunks(tables.segment_ids, pieces[:2], len(token_ids))
    assert row_codec.join_chunks(tables.segment_ids, [], 0) == array("I")


def test_checksum_of_whole_seconds_matches_after_reading() -> None:
    row = row_codec.context_row(context("a", 1, created=1, expires=7))
    assert row_codec.checksum_matches(tables.contexts, {**row, "created": 1.0, "expires": 7.0})


DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT)


@pytest.mark.parametrize("code", range(1, 29))
def test_no_sqlite_error_is_an_internal_error(code: int) -> None:
    error = sqlite3.OperationalError("the message of SQLite")
    error.sqlite_errorcode = code | 1 << 8
    found = runtime_error(Path("/data/catalog.db"), error)
    assert isinstance(found, DataLoss if code in DAMAGE else StorageUnavailable)
    assert "/data/catalog.db" in str(found) and "(the message of SQLite)" in str(found)
    assert isinstance(startup_error(Path("/data/catalog.db"), error), CatalogError)
