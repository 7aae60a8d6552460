"""Segments that are only in storage, and the restore that loads them: recovery, and ranks that fetch in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment
from coordinator.persistence.snapshots.snapshot_fetcher import SnapshotFetcher
from coordinator.recovery.fault_score import LOSS_SCORE
from coordinator.recovery.recovery import RecoveryManager
from longleaf.errors import LongleafError, StorageUnavailable
from longleaf.positions import WindowSpec
from longleaf.rank_protocol.snapshots import Fetch
from longleaf.rank_protocol.step import Restore
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt
from tests.support.coming import comes
from tests.support.fakes.ranks import FakeRanks

BLOCK = 4
TOKENS = 16
RANKS = 2
AWAY = StorageUnavailable("the storage is away")


class Archive:
    """The stored segments. It answers when allowed, and raises the configured errors by segment."""

    def __init__(self) -> None:
        self.manifests: dict[int, SegmentManifest] = {}
        self.failures: dict[int, LongleafError] = {}
        self.asked: list[int] = []
        self.forgotten: list[tuple[int, str]] = []
        self.is_answering = asyncio.Event()
        self.is_answering.set()
        self.may_forget = True
        self.imported: frozenset[int] = frozenset()
        """Segments that came with one archive."""

    def is_usable(self, segment_id: int) -> bool:
        return segment_id in self.manifests

    async def manifest(self, segment: Segment) -> SegmentManifest:
        self.asked.append(segment.id)
        await self.is_answering.wait()
        if segment.id in self.failures:
            raise self.failures[segment.id]
        return self.manifests[segment.id]

    def imported_with(self, segment_id: int) -> Sequence[int]:
        return sorted(self.imported) if segment_id in self.imported else ()

    async def forget(self, damaged: Mapping[int, str]) -> None:
        self.forgotten += damaged.items()
        if not self.may_forget:
            raise AWAY
        for segment_id in damaged:
            del self.manifests[segment_id]


class Members(FakeRanks):
    """Ranks that record the fetches requested of them, and execute them when allowed."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self.orders: list[tuple[int, Fetch]] = []
        self.is_fetching = asyncio.Event()
        self.is_fetching.set()

    async def fetch(self, member: int, order: Fetch) -> None:
        self.orders.append((member, order))
        await self.is_fetching.wait()
        await super().fetch(member, order)

    @property
    def names(self) -> list[str]:
        """Pieces that were ordered, in order."""
        return [order.name for _, order in self.orders]


class Returning:
    """Segments without holders, and the components that restore them."""

    def __init__(self, windows: WindowSpec | None) -> None:
        self.placer = BlockPlacer([32] * RANKS, BLOCK, windows)
        self.segments = SegmentStore(self.placer)
        self.archive = Archive()
        self.ranks = Members()
        self.num_changes = 0
        snapshots: Any = self.archive  # a duck type of Snapshots
        self.recovery = RecoveryManager(self.placer, self.segments, is_stored=self.archive.is_usable)
        self.fetching = SnapshotFetcher(
            self.recovery.restoring, snapshots, self.ranks, lambda: tuple(self.ranks.members), self._note
        )

    def _note(self) -> None:
        self.num_changes += 1

    def keep(self, number: int, num_pieces: int = 2) -> Segment:
        """Storage has a segment, in pieces of so many blocks each that together have all of it."""
        segment = Segment(number, EMPTY_PATH)
        segment.extend(range(TOKENS))
        place, size = Attempt("service", f"service-{number}", "a"), TOKENS // num_pieces
        runs = [(start, start + size) for start in range(0, TOKENS, size)]
        pieces = tuple(
            PieceRef(name=place.piece(i), runs=(run,), num_bytes=size, digest="00") for i, run in enumerate(runs)
        )
        windows = None
        if self.placer.windows is not None:
            windows = PieceRef(name=place.windows(0), runs=((TOKENS - BLOCK, TOKENS),), num_bytes=BLOCK, digest="00")
        self.archive.manifests[number] = manifest = SegmentManifest(
            service="service",
            fingerprint="checkpoint",
            form="fake",
            segment=place.segment,
            parent=None,
            start=0,
            num_tokens=TOKENS,
            rope=segment.rope,
            pieces=pieces,
            windows=windows,
            token_ids=segment.token_ids.tobytes(),
        )
        for piece in (*manifest.pieces, *([windows] if windows else [])):
            self.ranks.pieces[piece.name] = frozenset(range(*piece.runs[0]))
        return segment

    def call(self, segment: Segment) -> SegmentPlacement:
        """Requests a segment of which no rank holds anything."""
        self.segments.adopt(segment)
        placement = self.segments.placements[segment]
        self.segments.retain(segment.path)
        self.recovery.begin_reload([placement])
        return placement

    def lost(self, number: int, num_pieces: int = 2) -> SegmentPlacement:
        """A segment that is only in storage and is requested."""
        return self.call(self.keep(number, num_pieces))

    def turn(self) -> None:
        """As the engine does before it waits."""
        self.recovery.reserve_lost([])
        self.fetching.run_pending()

    async def turn_often(self) -> None:
        """Yields to the event loop more often than any task without a pending wait needs."""
        for _ in range(5):
            self.turn()
            await asyncio.sleep(0)

    async def until(self, is_so: Callable[[], object]) -> None:
        """Turns until it is so."""

        def turned() -> object:
            self.turn()
            return is_so()

        await comes(turned)

    def piece(self, number: int, index: int = 0) -> str:
        return self.archive.manifests[number].pieces[index].name

    def restore(self) -> Restore:
        """The step that writes the fetched pieces into blocks."""
        work = self.recovery.plan([], TOKENS)
        assert isinstance(work, Restore)
        self.ranks._check(work)
        self.recovery.commit()
        return work

    async def restore_all(self) -> None:
        while not self.segments.placements.is_whole:
            await self.until(lambda: self.can_restore)
            self.restore()

    @property
    def can_restore(self) -> bool:
        restoring = self.recovery.restoring
        return any(restoring._ready(one) for one in restoring._returns.values())

    def end_epoch(self, *survivors: int) -> None:
        """Ends an epoch: work in flight is dropped, and the survivors become the next ranks."""
        self.recovery.undo([], LOSS_SCORE)
        self.recovery.change_ranks(RankMapping(2, survivors, (32,) * len(survivors)))


@asynccontextmanager
async def opened(windows: WindowSpec | None = None) -> AsyncIterator[Returning]:
    bench = Returning(windows)
    try:
        yield bench
    finally:
        async with asyncio.timeout(3):
            await bench.fetching.close()
