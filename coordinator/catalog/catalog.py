"""A catalog: contexts and their token ids in a database, written by one thread in the order of the calls."""

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, Self

from sqlalchemy import Connection, delete, insert, select, text, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.catalog.database import erase_log, open_database, writing
from coordinator.catalog.records import Change, ContextRecord, Kept, SegmentRecord
from coordinator.catalog.rows import Damaged, context_of, context_row, segment_of, segment_row, token_rows
from coordinator.catalog.schema import CONTEXTS, SEGMENTS, SERVICE, TOKEN_IDS

log = logging.getLogger(__name__)
FILE = "catalog.sqlite"
SERVICE_ID_BYTES = 16
ORPHANS = text(
    """
    DELETE FROM segments WHERE id NOT IN (
        WITH RECURSIVE reached(id) AS (
            SELECT segment FROM contexts
            UNION SELECT parent FROM segments JOIN reached USING (id) WHERE parent IS NOT NULL
        ) SELECT id FROM reached
    )
    """
)
"""Segments that no context leads through."""


class ContextCatalog(Protocol):
    """What lasts of contexts. Implemented by Catalog; faked by coordinator.catalog.fakes."""

    @property
    def kept(self) -> Kept:
        """What was there when it was opened."""
        ...

    async def commit(self, change: Change) -> None:
        """Returns when a change is kept. Changes are made in the order of the calls. Raises StorageUnavailable when it
        cannot be: then nothing of it is."""
        ...

    async def note_epoch(self, epoch: int) -> None:
        """Epochs of services to come have larger numbers. Raises StorageUnavailable."""
        ...


class Catalog:
    """The catalog of a folder. All is written by one thread of its own."""

    def __init__(self, connection: Connection, path: Path, kept: Kept) -> None:
        self._connection = connection
        self._path = path
        self._kept = kept
        self._writer = ThreadPoolExecutor(1, "catalog")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens the catalog of a folder, or makes one. Takes as long as reading all token ids. Raises CatalogError, and
        StorageUnavailable when a new one cannot be written."""
        path = folder / FILE
        connection = open_database(path)
        try:
            with writing(connection, path):
                if connection.execute(select(SERVICE)).first() is None:
                    row = {"service_id": secrets.token_hex(SERVICE_ID_BYTES), "epoch": 0, "next_segment": 0}
                    connection.execute(insert(SERVICE).values(row))
                kept = _load(connection)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path, kept)

    @property
    def kept(self) -> Kept:
        return self._kept

    async def commit(self, change: Change) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._commit, change)

    async def note_epoch(self, epoch: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._note_epoch, epoch)

    async def close(self) -> None:
        """Ends when all is written."""
        await asyncio.to_thread(self._writer.shutdown)
        self._connection.close()
        self._connection.engine.dispose()

    def _commit(self, change: Change) -> None:
        connection = self._connection
        with writing(connection, self._path):
            for segment in change.segments:
                connection.execute(insert(SEGMENTS).values(segment_row(segment)))
                for row in token_rows(segment):
                    connection.execute(insert(TOKEN_IDS).values(row))
            if change.segments:
                least = max(segment.id for segment in change.segments) + 1
                connection.execute(update(SERVICE).where(SERVICE.c.next_segment < least).values(next_segment=least))
            for context in change.contexts:
                row = context_row(context)
                connection.execute(upsert(CONTEXTS).values(row).on_conflict_do_update(set_=row))
            if change.dropped:
                connection.execute(delete(CONTEXTS).where(CONTEXTS.c.id.in_(change.dropped)))
            if not change.segments:
                connection.execute(ORPHANS)
        if change.dropped:
            try:
                erase_log(connection)
            except sqlite3.Error as error:
                log.warning("%s: what was deleted may lie there until the next change: %s", self._path, error)

    def _note_epoch(self, epoch: int) -> None:
        with writing(self._connection, self._path):
            self._connection.execute(update(SERVICE).values(epoch=epoch))


def _load(connection: Connection) -> Kept:
    service = connection.execute(select(SERVICE)).mappings().one()
    segments, wrong = _segments(connection)
    contexts, damaged = list[ContextRecord](), list[tuple[str, str]]()
    for row in connection.execute(select(CONTEXTS).order_by(CONTEXTS.c.id)).mappings():
        try:
            context = context_of(row)
            if context.segment not in segments:
                raise Damaged(wrong.get(context.segment, f"segment {context.segment} is not there"))
            contexts.append(context)
        except Damaged as error:
            damaged.append((str(row["id"]), str(error)))
    return Kept(
        service_id=service["service_id"],
        epoch=service["epoch"],
        next_segment=service["next_segment"],
        segments=tuple(segments.values()),
        contexts=tuple(contexts),
        damaged=tuple(damaged),
    )


def _segments(connection: Connection) -> tuple[dict[int, SegmentRecord], dict[int, str]]:
    """The segments by id, and what is wrong with others."""
    tokens = connection.execute(select(TOKEN_IDS).order_by(TOKEN_IDS.c.segment, TOKEN_IDS.c.number)).mappings()
    ids = groupby(tokens, key=lambda row: row["segment"])
    following = next(ids, None)
    found, wrong = dict[int, SegmentRecord](), dict[int, str]()
    for row in connection.execute(select(SEGMENTS).order_by(SEGMENTS.c.id)).mappings():
        own: Iterator[Mapping[Any, Any]] = iter(())
        if following is not None and following[0] == row["id"]:
            own = iter(list(following[1]))
            following = next(ids, None)
        try:
            record = segment_of(row, own)
            if record.parent is not None and record.parent not in found:
                raise Damaged(wrong.get(record.parent, f"segment {record.parent} is not there"))
            found[record.id] = record
        except Damaged as error:
            wrong[row["id"]] = str(error)
    return found, wrong
