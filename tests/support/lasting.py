"""The state that survives an engine, in memory: a catalog, and a journal that records removals."""

from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.stale_contexts import StaleContext
from coordinator.persistence.snapshots.snapshots import Snapshots
from longleaf.errors import LongleafError
from tests.support.fakes.catalog import FakeCatalog


class RecordingJournal:
    """Records the contexts whose entries are removed. Its failures can be set."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.failures: list[LongleafError] = []
        """Each is raised by one of the next calls, in this order."""

    def remove_of_context(self, context: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.forgotten.append(context)


class MemoryLasting:
    """Engines that are given the same one follow each other."""

    def __init__(self) -> None:
        self.catalog = FakeCatalog()
        self.journal = RecordingJournal()
        self.snapshots: Snapshots | None = None
        self.earlier: dict[str, StaleContext] = {}
        """Contexts that an earlier checkpoint has read."""
        self.num_readings = 0

    @property
    def stale(self) -> "MemoryLasting":
        """A duck type of StaleContexts."""
        return self

    @property
    def changed(self) -> dict[str, str]:
        return {name: each.changes for name, each in self.earlier.items()}

    def read(self) -> dict[str, StaleContext]:
        self.num_readings += 1
        return self.earlier

    @property
    def contents(self) -> CatalogContents:
        return self.catalog.contents

    @property
    def contexts(self) -> dict[str, int]:
        """Tokens of those that are kept, by id."""
        return {context.id: context.num_tokens for context in self.contents.contexts}
