"""Reload of segments from storage: the coordinator reads the manifests, and the ranks fetch the pieces."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from coordinator.cluster.ports import Ranks
from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.snapshots.snapshots import Snapshots
from coordinator.recovery.restore import (
    CheckSnapshot,
    DamagedRemoved,
    DiscardPiece,
    FetchPiece,
    ManifestFound,
    PieceFetched,
    ReadManifest,
    RemoveDamaged,
    RestorePlanner,
    SegmentUnavailable,
    SnapshotDamaged,
)
from coordinator.task_set import TaskSet
from longleaf.errors import DataLoss, LongleafError, NotFound, StorageUnavailable, Unavailable
from longleaf.formatting import human_seconds
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.snapshots import Fetch

FETCH_SECONDS = 30.0
"""Timeout in seconds for reading a manifest and for fetching a piece. Recomputing the segment takes no longer."""
FORGET_SECONDS = 30.0
"""The interval in seconds at which the removal of damaged segments from the catalog is retried."""
log = logging.getLogger(__name__)


class SnapshotFetcher:
    """Executes the actions of a RestorePlanner, and reports the results to it. `members` returns the numbers of the
    ranks; `on_change` is called when the recovery can continue.
    """

    def __init__(
        self,
        restoring: RestorePlanner,
        snapshots: Snapshots,
        ranks: Ranks,
        members: Callable[[], Sequence[int]],
        on_change: Callable[[], None],
    ) -> None:
        self._restoring = restoring
        self._snapshots = snapshots
        self._ranks = ranks
        self._members = members
        self._on_change = on_change
        self._tasks = TaskSet()
        self._fetching: dict[int, Sequence[int]] = {}
        """Members that were ordered to fetch a piece, by ticket."""

    def run_pending(self) -> None:
        """Start the pending actions."""
        while actions := self._restoring.pop_actions():
            for action in actions:
                match action:
                    case ReadManifest(segment):
                        self._tasks.start(self._read_manifest(segment))
                    case FetchPiece(ticket, rank):
                        members = tuple(self._members())
                        self._fetching[ticket] = members if rank == EVERY_RANK else (members[rank],)
                        self._tasks.start(self._fetch(action, self._fetching[ticket]))
                    case DiscardPiece(ticket):
                        for member in self._fetching.pop(ticket):
                            self._tasks.start(self._discard(member, ticket))
                    case CheckSnapshot(segment_id):
                        if self._snapshots.imported_with(segment_id):  # else the ranks themselves may be the cause
                            self._report_damage(segment_id, "an epoch failed while it was restored")
                    case RemoveDamaged(reasons):
                        self._tasks.start(self._remove_damaged(reasons))

    def _report_damage(self, segment_id: int, reason: str, ticket: int | None = None) -> None:
        imported_with = self._snapshots.imported_with(segment_id)
        self._restoring.handle(SnapshotDamaged(segment_id, reason, imported_with, ticket))

    async def _read_manifest(self, segment: Segment) -> None:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                manifest = await self._snapshots.manifest(segment)
            self._restoring.handle(ManifestFound(segment.id, manifest.pieces, manifest.windows))
        except (NotFound, DataLoss) as error:
            self._report_damage(segment.id, str(error))
        except (LongleafError, TimeoutError) as error:
            log.warning("recomputing segment %d: cannot read its manifest: %s", segment.id, _reason(error))
            self._restoring.handle(SegmentUnavailable(segment.id))
        except Exception as error:  # otherwise the planner would wait forever for an answer
            log.error("recomputing segment %d: unexpected error", segment.id, exc_info=error)
            self._restoring.handle(SegmentUnavailable(segment.id))
        self._on_change()

    async def _fetch(self, fetch: FetchPiece, members: Sequence[int]) -> None:
        piece, segment_id = fetch.piece, fetch.segment_id
        order = Fetch(fetch.ticket, piece.name, piece.num_bytes, piece.digest, piece.runs, fetch.of_windows)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await asyncio.gather(*(self._ranks.fetch(member, order) for member in members))
        except DataLoss as error:
            self._report_damage(segment_id, str(error), fetch.ticket)
        except (StorageUnavailable, TimeoutError) as error:
            if self._restoring.needs(segment_id):
                log.warning("recomputing segment %d: cannot fetch %s: %s", segment_id, piece.name, _reason(error))
            self._restoring.handle(SegmentUnavailable(segment_id))
        except Unavailable:
            return  # the epoch ends, or the piece is no longer needed
        except Exception as error:
            log.error("recomputing segment %d: unexpected error", segment_id, exc_info=error)
            self._restoring.handle(SegmentUnavailable(segment_id))
        else:
            self._restoring.handle(PieceFetched(fetch.ticket))
        self._on_change()

    async def _discard(self, member: int, ticket: int) -> None:
        try:
            await self._ranks.discard(member, [ticket])
        except LongleafError as error:
            log.debug("member %d did not discard ticket %d: %s", member, ticket, error)

    async def _remove_damaged(self, reasons: Mapping[int, str]) -> None:
        while True:
            try:
                await self._snapshots.forget(reasons)
                break
            except LongleafError as error:  # the segments are not used until their removal succeeds
                segment_id = next(iter(reasons))
                log.warning("cannot remove the damaged snapshot of segment %d: %s", segment_id, error)
            await asyncio.sleep(FORGET_SECONDS)
        self._restoring.handle(DamagedRemoved(reasons))

    async def close(self) -> None:
        """Cancel the running operations."""
        await self._tasks.cancel()


def _reason(error: LongleafError | TimeoutError) -> str:
    return str(error) or f"no result within {human_seconds(FETCH_SECONDS)}"
