"""Services over a storage in memory, whose ranks write as many bytes as positions, and wait where a test wants it."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from coordinator.cluster.ports import Formation
from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from coordinator.persistence.snapshots.snapshots import Snapshots, no_size_check
from longleaf.config import EngineConfig
from longleaf.positions import WindowSpec
from longleaf.rank_protocol.snapshots import Fetch, Save, Saved
from longleaf.rank_protocol.step import StepPlan, StepResult
from longleaf.sampling import SamplingParams
from longleaf.storage.names import segments_folder
from longleaf.storage.store import Store
from tests.support.fakes.ranks import FakeRanks
from tests.support.fakes.storage import FlakyFiles, MemoryFiles
from tests.support.lasting import MemoryLasting
from tests.support.running import running

FORM = "blocks of 4; keys.0 F32 2x4x32768"
"""Of which a block fills a piece."""
NOW = 1e12


class Gate(asyncio.Event):
    """Open until it is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.set()


class StoringRanks(FakeRanks):
    """Their pieces are in `store`, and their positions in `pieces`."""

    def __init__(self, store: Store, world_size: int = 2, windows: WindowSpec | None = None, form: str = FORM) -> None:
        super().__init__(world_size, 100, windows=windows)
        self._store = store
        self._form = form
        self.may_form, self.may_step, self.may_save, self.may_fetch = Gate(), Gate(), Gate(), Gate()
        self.late: Collection[str] = ()
        """Pieces that wait for `may_fetch`; none are named: all do."""
        self.num_saves = self.num_fetches = 0

    async def form(self, epoch: int) -> Formation:
        await self.may_form.wait()
        formation = await super().form(epoch)
        return dataclasses.replace(
            formation, readies=tuple(replace(ready, form=self._form) for ready in formation.readies)
        )

    async def step(self, plan: StepPlan) -> StepResult:
        await self.may_step.wait()
        return await super().step(plan)

    async def save(self, member: int, order: Save) -> Saved:
        self.num_saves += 1
        await self.may_save.wait()
        saved = await super().save(member, order)
        written = await asyncio.to_thread(self._store.put, order.name, [bytes(saved.num_bytes)])
        return replace(saved, digest=written.digest)

    async def fetch(self, member: int, order: Fetch) -> None:
        self.num_fetches += 1
        if not self.late or order.name in self.late:
            await self.may_fetch.wait()
        await super().fetch(member, order)


class Storage:
    """Outlives services, and so does the catalog."""

    def __init__(self) -> None:
        self.files = FlakyFiles(MemoryFiles())
        self.store = Store(self.files, "memory")
        self.lasting = MemoryLasting()
        self.pieces: dict[str, frozenset[int]] = {}

    def ranks(self, world_size: int = 2, windows: WindowSpec | None = None, form: str = FORM) -> StoringRanks:
        ranks = StoringRanks(self.store, world_size, windows, form)
        ranks.pieces = self.pieces
        return ranks

    @property
    def num_objects(self) -> int:
        """Of segments."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """All objects of segments, sorted."""
        folder = segments_folder(self.lasting.contents.service_id)
        return sorted(entry.name for entry in self.store.list(folder))


@dataclasses.dataclass(frozen=True)
class Service:
    """One of the services over a storage."""

    engine: Engine
    ranks: StoringRanks
    snapshots: Snapshots


@asynccontextmanager
async def serving(
    storage: Storage,
    ranks: StoringRanks | None = None,
    policy: RetentionPolicy | None = None,
    model: str = "none",
    check_room: Callable[[int], None] = no_size_check,
) -> AsyncGenerator[Service, None]:
    ranks = ranks or storage.ranks()
    persistence: Any = storage.lasting  # a duck type of PersistentState
    config = EngineConfig(model=model, world_size=ranks.world_size, chunk_size=32, block_size=4, replicate_below=8)
    snapshots = Snapshots(
        storage.store,
        persistence.catalog,
        persistence.contents,
        "checkpoint",
        policy or RetentionPolicy(grace=NOW),
        lambda: NOW,
        check_room,
    )
    persistence.snapshots = snapshots
    async with running(Engine(ranks, config, 3000, durability=persistence, wall_clock=lambda: 12.0)) as found:
        yield Service(found.engine, ranks, snapshots)


async def ingest(engine: Engine, ids: Sequence[int], name: str = "book", *, append: bool = False) -> None:
    """Reads a document to its end."""
    async for _ in engine.ingest(DocumentPrompt(context=name, token_ids=ids, append=append)):
        pass


async def ingest_two(engine: Engine) -> tuple[int, ...]:
    """The segments of a book that was appended to."""
    await ingest(engine, range(40))
    await ingest(engine, range(100, 120), append=True)
    return engine.named("book").path.ids


async def ask(engine: Engine) -> list[int]:
    """Asks the book; the ids of the answer."""
    prompt = Prompt(context="book", token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    events = [event async for event in engine.submit(prompt)]
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
