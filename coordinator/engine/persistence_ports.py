"""Ports to the state that outlives a service."""

from collections.abc import Mapping
from typing import Protocol

from coordinator.persistence.catalog.ports import ContextCatalog
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.stale_contexts import StaleContext
from coordinator.persistence.snapshots.snapshots import Snapshots


class JournalRemover(Protocol):
    """Other stored state of contexts."""

    def remove_of_context(self, context: str) -> None:
        """Deletes everything about a context. Raises StorageUnavailable."""
        ...


class Persistence(Protocol):
    """The state that outlives a service."""

    @property
    def catalog(self) -> ContextCatalog: ...

    @property
    def contents(self) -> CatalogContents:
        """Contents of the catalog at the start of the service."""
        ...

    @property
    def changed(self) -> Mapping[str, str]:
        """Stored contexts of previous contents of the model folder, with the differences."""
        ...

    @property
    def journal(self) -> JournalRemover: ...

    @property
    def snapshots(self) -> Snapshots | None:
        """None: keys and values are not stored."""
        ...

    def read_stale(self) -> Mapping[str, StaleContext]:
        """Reads these contexts from their catalogs. Blocks on the disk."""
        ...
