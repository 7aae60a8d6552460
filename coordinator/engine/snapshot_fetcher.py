"""Reload of segments from storage: the coordinator reads the manifests, and the ranks fetch the pieces."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from coordinator.cluster.ports import Ranks
from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.snapshots.snapshots import Snapshots
from coordinator.recovery.restore import OF_WINDOWS, RestoreChunk, RestorePlanner
from coordinator.task_set import TaskSet
from longleaf.errors import DataLoss, LongleafError, NotFound, StorageUnavailable, Unavailable
from longleaf.formatting import human_seconds
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.snapshots import Fetch
from longleaf.storage.manifest import PieceRef, SegmentManifest

FETCH_SECONDS = 30.0
"""Timeout in seconds for reading a manifest and for fetching a piece. Recomputing the segment takes no longer."""
FORGET_SECONDS = 30.0
"""The interval in seconds at which the removal of damaged segments from the catalog is retried."""
log = logging.getLogger(__name__)


class SnapshotFetcher:
    """Executes the orders of the RestorePlanner. `members` returns the numbers of the ranks; `on_change` is called when
    the recovery can continue.
    """

    def __init__(
        self, manifests: Snapshots, ranks: Ranks, members: Callable[[], Sequence[int]], on_change: Callable[[], None]
    ) -> None:
        self._manifests = manifests
        self._ranks = ranks
        self._members = members
        self._on_change = on_change
        self._restoring: RestorePlanner | None = None
        self._tasks = TaskSet()
        self._pieces: dict[int, SegmentManifest] = {}
        """The manifests of segments whose pieces are being fetched, by segment id."""
        self._sent: dict[int, tuple[int, ...]] = {}
        """Members that were ordered to fetch a piece, by ticket."""
        self._damaged: dict[int, str] = {}
        """The reasons for damaged segments, by segment id, until the segments are removed from the catalog. The removal
        waits until their fetches have ended.
        """
        self._being_removed: set[int] = set()

    def begin(self, restoring: RestorePlanner) -> None:
        self._restoring = restoring

    def is_stored(self, segment_id: int) -> bool:
        """Whether a segment can be restored. Implements `is_stored` of RestorePlanner."""
        return segment_id not in self._damaged and self._manifests.is_usable(segment_id)

    def run_pending(self) -> None:
        """Execute the pending orders."""
        assert self._restoring is not None
        restoring = self._restoring
        for segment_id in restoring.pop_broken():
            if self._manifests.imported_with(segment_id):  # else the ranks themselves may be the cause
                self._mark_damaged(restoring, segment_id, "an epoch failed while it was restored")
        for ticket in (discarded := restoring.pop_discarded()):
            for member in self._sent.pop(ticket, ()):
                self._tasks.start(self._discard(member, ticket))
        for segment in restoring.pop_wanted():
            self._tasks.start(self._read_manifest(restoring, segment))
        for part in restoring.pop_ordered():
            if part.ticket not in discarded:  # else the fetched piece would never be discarded
                self._start_fetch(restoring, part)
        for segment_id in [one for one in self._pieces if not restoring.needs(one)]:
            del self._pieces[segment_id]
        damaged = self._damaged.items()
        free = {one: why for one, why in damaged if not (restoring.needs(one) or one in self._being_removed)}
        if free:
            self._being_removed |= free.keys()
            self._tasks.start(self._remove_damaged(free))

    def _mark_damaged(self, restoring: RestorePlanner, segment_id: int, reason: str) -> None:
        """Mark a segment as damaged on storage. Neither it nor any segment of its archive is restored from then on."""
        self._damaged.setdefault(segment_id, reason)
        for other in self._manifests.imported_with(segment_id):
            if other != segment_id:
                self._damaged.setdefault(other, f"it was imported with segment {segment_id}, which is damaged")
                restoring.mark_unavailable(other)

    # --- manifests ---

    async def _read_manifest(self, restoring: RestorePlanner, segment: Segment) -> None:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                manifest = await self._manifests.manifest(segment)
            self._pieces[segment.id] = manifest
            windows = manifest.windows.runs if manifest.windows else ()
            restoring.set_pieces(segment.id, [piece.runs for piece in manifest.pieces], windows)
        except (NotFound, DataLoss) as error:
            self._mark_damaged(restoring, segment.id, str(error))
            restoring.mark_unavailable(segment.id)
        except (LongleafError, TimeoutError) as error:
            reason = _reason(error)
            log.warning("recomputing segment %d: cannot read its manifest: %s", segment.id, reason)
            restoring.mark_unavailable(segment.id)
        except Exception as error:  # otherwise the planner would wait forever for an answer
            log.error("recomputing segment %d: unexpected error", segment.id, exc_info=error)
            restoring.mark_unavailable(segment.id)
        self._on_change()

    async def _remove_damaged(self, damaged: Mapping[int, str]) -> None:
        while True:
            try:
                await self._manifests.forget(damaged)
                break
            except LongleafError as error:  # the segment is not used until its removal succeeds
                segment_id = next(iter(damaged))
                log.warning("cannot remove the damaged snapshot of segment %d: %s", segment_id, error)
            await asyncio.sleep(FORGET_SECONDS)
        for segment_id in damaged:
            self._being_removed.discard(segment_id)
            del self._damaged[segment_id]

    # --- pieces ---

    def _start_fetch(self, restoring: RestorePlanner, part: RestoreChunk) -> None:
        found = self._pieces.get(part.segment)
        piece = None if found is None else found.windows if part.piece == OF_WINDOWS else found.pieces[part.piece]
        if piece is None:  # the epoch has ended in the meantime
            restoring.on_fetched(part.ticket, is_there=False)
            return
        members = tuple(self._members())
        targets = members if part.rank == EVERY_RANK else (members[part.rank],)
        self._sent[part.ticket] = targets
        self._tasks.start(self._fetch(restoring, part, piece, targets))

    async def _fetch(
        self, restoring: RestorePlanner, part: RestoreChunk, piece: PieceRef, members: Sequence[int]
    ) -> None:
        of_windows = part.piece == OF_WINDOWS
        order = Fetch(part.ticket, piece.name, piece.num_bytes, piece.digest, piece.runs, of_windows)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await asyncio.gather(*(self._ranks.fetch(member, order) for member in members))
        except DataLoss as error:
            self._mark_damaged(restoring, part.segment, str(error))
            if self._manifests.imported_with(part.segment):
                restoring.mark_unavailable(part.segment)
            restoring.on_fetched(part.ticket, is_there=False)
        except (StorageUnavailable, TimeoutError) as error:
            reason = _reason(error)
            if restoring.needs(part.segment):
                log.warning("recomputing segment %d: cannot fetch %s: %s", part.segment, piece.name, reason)
            restoring.mark_unavailable(part.segment)
        except Unavailable:
            return  # the epoch ends, or the piece is no longer needed
        except Exception as error:
            log.error("recomputing segment %d: unexpected error", part.segment, exc_info=error)
            restoring.mark_unavailable(part.segment)
        else:
            restoring.on_fetched(part.ticket, is_there=True)
        self._on_change()

    async def _discard(self, member: int, ticket: int) -> None:
        try:
            await self._ranks.discard(member, [ticket])
        except LongleafError as error:
            log.debug("member %d did not discard ticket %d: %s", member, ticket, error)

    async def close(self) -> None:
        """Cancel the running operations."""
        await self._tasks.cancel()


def _reason(error: LongleafError | TimeoutError) -> str:
    return str(error) or f"no result within {human_seconds(FETCH_SECONDS)}"
