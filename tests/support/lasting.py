"""What outlives an engine, in memory: a catalog, and a journal that notes what it must forget."""

from coordinator.catalog.fakes import FakeCatalog
from coordinator.catalog.records import Kept
from coordinator.snapshots.snapshots import Snapshots


class NotedJournal:
    """Notes which contexts are forgotten."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def remove_of_context(self, context: str) -> None:
        self.forgotten.append(context)


class MemoryLasting:
    """Engines that are given the same one follow each other."""

    def __init__(self) -> None:
        self.catalog = FakeCatalog()
        self.journal = NotedJournal()
        self.changed: dict[str, str] = {}
        self.snapshots: Snapshots | None = None

    @property
    def kept(self) -> Kept:
        return self.catalog.kept

    @property
    def contexts(self) -> dict[str, int]:
        """Tokens of those that are kept, by id."""
        return {context.id: context.num_tokens for context in self.kept.contexts}
