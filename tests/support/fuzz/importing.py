"""Services that forged archives are imported into: an engine whose ranks take in real pieces."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from msgspec.structs import replace

from coordinator.cluster.ports import Formation
from coordinator.engine_messages import Prompt, Tokens
from coordinator.handlers.transfer.imports import ImportSessions
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from longleaf.errors import DataLoss, GroupFailed, NotFound
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.rank_protocol.snapshots import Fetch
from longleaf.rank_protocol.step import Restore
from longleaf.sampling import SamplingParams
from longleaf.storage.store import Store
from longleaf.types import ArchiveChunk, Context, ImportHeader
from tests.support.archives import FINGERPRINT
from tests.support.fuzz.archives import BLOCK, NUM_WINDOW_BLOCKS, VOCABULARY, WINDOW, forge, pool
from tests.support.storing import NOW, Service, Storage, StoringRanks, ingest, serving
from workers.kv_io.kv_piece import KvPiece, form_of
from workers.runners.kv_restore import check, write_piece

WINDOWS = WindowSpec(reaches=(AttentionSpan(window=WINDOW),), num_blocks=NUM_WINDOW_BLOCKS)
AT_ONCE = 500
"""Bytes of a request."""


class PieceRanks(StoringRanks):
    """Ranks that decode the fetched pieces as those with a model do: an error in one ends the epoch."""

    def __init__(self, store: Store, *, windows: bool) -> None:
        super().__init__(store, windows=WINDOWS if windows else None)
        self.slots = pool(windows=windows)
        self.num_restored = 0
        self._there: dict[tuple[int, int], KvPiece] = {}

    async def form(self, epoch: int) -> Formation:
        formation = await super().form(epoch)
        forms = [form_of(self.slots, of_windows=of_windows) for of_windows in (False, True)]
        readies = [replace(ready, form=forms[0], form_of_windows=forms[1]) for ready in formation.readies]
        return Formation(formation.epoch, formation.hellos, tuple(readies), formation.group)

    async def fetch(self, member: int, order: Fetch) -> None:
        try:
            data = self._store.get(order.name, order.digest)
        except NotFound as error:
            raise DataLoss(order.name, "it is not there") from error
        if len(data) != order.num_bytes:
            raise DataLoss(order.name, "it has another size")
        self._there[member, order.ticket] = KvPiece(
            order.name, data, self.slots, order.ranges, of_windows=order.of_windows
        )

    def _check(self, work: Restore) -> None:
        try:
            check(work, self.world_size, BLOCK)
            parts = [(portion.runs[0].rank, portion.ticket, portion.runs, False) for portion in work.portions]
            parts += [(rank, work.window_ticket, work.window_runs, True) for rank in range(2) if work.window_runs]
            for rank, ticket, runs, of_windows in parts:
                there = self._there.get((self.members[rank], ticket))
                if not write_piece(there, runs, self.slots, of_windows=of_windows):
                    raise ValueError(f"ticket {ticket} has no {runs}")
        except Exception as error:
            self.break_epoch(f"{type(error).__name__}: {error}", self.plans[-1].step)
            raise GroupFailed(str(error)) from error
        self.num_restored += 1


@asynccontextmanager
async def importing(*, windows: bool) -> AsyncGenerator[tuple[Service, PieceRanks], None]:
    """A service with a context `victim`."""
    storage = Storage()
    ranks = PieceRanks(storage.store, windows=windows)
    async with serving(storage, ranks, RetentionPolicy("demand", grace=NOW)) as service:
        service.engine.transfers._fingerprint = FINGERPRINT
        await ingest(service.engine, range(50), "victim")
        yield service, ranks


async def arrive(imports: ImportSessions, data: bytes) -> Context | None:
    """Imports an archive. Raises the client's error."""

    async def sent() -> AsyncIterator[ImportHeader | ArchiveChunk]:
        yield ImportHeader()
        for at in range(0, len(data), AT_ONCE):
            yield ArchiveChunk(at, data[at : at + AT_ONCE])

    async with aclosing(imports.run(sent())) as reports:
        return [report async for report in reports][-1].context


async def answer(service: Service, context: str) -> list[int]:
    prompt = Prompt(context=context, token_ids=(1, 2), sampling=SamplingParams(max_tokens=3))
    events = [event async for event in service.engine.submit(prompt)]
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def archive(seed: int, ranks: PieceRanks) -> bytes:
    return forge(seed, ranks.slots, FINGERPRINT)


def imports_of(service: Service) -> ImportSessions:
    return ImportSessions(service.engine.transfers, VOCABULARY, wall_clock=lambda: 12.0)
