"""Saves one segment: ranks write pieces in parallel, then the manifest is written."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from coordinator.cluster.ports import Ranks
from coordinator.persistence.snapshots.chunking import cut_pieces
from coordinator.persistence.snapshots.kv_format import KvFormat
from coordinator.persistence.snapshots.segments_on_ranks import PlacedSegment, SegmentsOnRanks
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.errors import NotFound, StorageUnavailable, Unavailable
from longleaf.rank_protocol.snapshots import Save, Saved
from longleaf.runs import Run
from longleaf.storage.manifest import PieceRef, SegmentManifest, encode_manifest
from longleaf.storage.names import Attempt, segment_name

MAX_ORDERS = 2
"""Maximum number of concurrent pieces per member; equal to the number of its I/O threads."""
WINDOWS_RANK = 0
"""The rank that saves the window runs, which all ranks hold."""


class SegmentWriter:
    """Saves segments of one service, with ranks of one layout."""

    def __init__(
        self,
        store: AsyncStore,
        service: str,
        fingerprint: str,
        form: KvFormat,
        placements: SegmentsOnRanks,
        ranks: Ranks,
    ) -> None:
        self._store = store
        self._service = service
        self._fingerprint = fingerprint
        self._form = form
        self._placements = placements
        self._ranks = ranks
        self._tickets = count()

    def attempt(self, segment_id: int, name: str | None = None) -> Attempt:
        """Object names for an attempt. An earlier attempt for this segment must not have used `name`; the default is
        random."""
        return Attempt(self._service, segment_name(self._service, segment_id), name or secrets.token_hex(8))

    async def save(self, attempt: Attempt, segment: PlacedSegment) -> tuple[SegmentManifest, int]:
        """Writes a segment. Returns the manifest, which is on storage, and the bytes of all objects.

        Raises StorageUnavailable, RankLost, and Unavailable if part of the segment has moved meanwhile. After an error,
        the written objects must not be used.
        """
        pieces = cut_pieces(segment.runs, self._form.block_size, self._form.block_bytes)
        saving = _Saving(segment)
        saves = [self._save(saving, attempt.piece(number), runs) for number, runs in enumerate(pieces)]
        if segment.window_runs:
            saves.append(self._save(saving, attempt.windows(0), segment.window_runs, of_windows=True))
        found = await saving.gather(saves)
        if self._placements.placed(segment.segment.id) != segment:
            raise Unavailable(f"segment {segment.segment.id} was moved or evicted while it was saved")
        await self._check_seen(segment, pieces, found)
        windows = found.pop() if segment.window_runs else None
        manifest = SegmentManifest.of(
            attempt, segment.segment.record, self._fingerprint, self._form.text, found, windows
        )
        content = encode_manifest(manifest)
        await self._store.put(attempt.manifest, content, is_new=True)
        return manifest, len(content) + sum(piece.num_bytes for piece in manifest.all_pieces)

    async def _save(self, saving: "_Saving", name: str, runs: tuple[Run, ...], of_windows: bool = False) -> PieceRef:
        rank, resident = WINDOWS_RANK if of_windows else runs[0].rank, saving.placed
        async with saving.slot(rank):
            order = Save(next(self._tickets), name, resident.segment.id, runs, of_windows)
            saved: Saved = await self._ranks.save(resident.members[rank], order)
        return PieceRef(
            name=name, runs=tuple(run.range for run in runs), num_bytes=saved.num_bytes, digest=saved.digest
        )

    async def _check_seen(
        self, segment: PlacedSegment, pieces: Sequence[tuple[Run, ...]], found: Sequence[PieceRef]
    ) -> None:
        """Checks that this process can read the objects that the ranks wrote, by the last piece of each rank."""
        last = dict(zip([*(runs[0].rank for runs in pieces), WINDOWS_RANK], found, strict=False))
        for rank, piece in last.items():
            try:
                size = await self._store.size(piece.name)
            except NotFound:
                size = -1
            if size != piece.num_bytes:
                message = f"{piece.name}, written by rank {rank}, member {segment.members[rank]}, is missing"
                remedy = "--snapshot-url must be storage that all machines share"
                raise StorageUnavailable(f"{self._store.store.url}: {message}; {remedy}")


class _Saving:
    """The pieces of one segment. Each rank writes at most MAX_ORDERS pieces at a time."""

    def __init__(self, placed: PlacedSegment) -> None:
        self.placed = placed
        self._limits = [asyncio.Semaphore(MAX_ORDERS) for _ in placed.members]
        self._failure: Exception | None = None
        """The first failure."""

    @asynccontextmanager
    async def slot(self, rank: int) -> AsyncGenerator[None, None]:
        """Waits for a free slot of a rank. Raises the first failure of any rank."""
        async with self._limits[rank]:
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except Exception as error:
                self._failure = self._failure or error
                raise

    async def gather(self, saves: Sequence[Coroutine[Any, Any, PieceRef]]) -> list[PieceRef]:
        """Returns the results of the saves. After a failure no more saves start, and the error is raised once the
        running saves have ended: objects written after that would never be deleted."""
        tasks = [asyncio.ensure_future(save) for save in saves]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        return [task.result() for task in tasks]
