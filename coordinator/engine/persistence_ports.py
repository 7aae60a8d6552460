"""What outlives a service, as an engine sees it."""

from collections.abc import Mapping
from typing import Protocol

from coordinator.persistence.catalog.ports import ContextCatalog
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.stale_contexts import StaleContext
from coordinator.persistence.snapshots.snapshots import Snapshots


class JournalRemover(Protocol):
    """What else is kept of contexts."""

    def remove_of_context(self, context: str) -> None:
        """Forgets all of a context. Raises StorageUnavailable."""
        ...


class Persistence(Protocol):
    """What outlives a service."""

    @property
    def catalog(self) -> ContextCatalog: ...

    @property
    def kept(self) -> CatalogContents:
        """What the catalog held when the service began."""
        ...

    @property
    def changed(self) -> Mapping[str, str]:
        """Contexts that are kept for what lay in the model's folder before, and what differs since."""
        ...

    @property
    def journal(self) -> JournalRemover: ...

    @property
    def snapshots(self) -> Snapshots | None:
        """None: keys and values are kept nowhere."""
        ...

    def read_earlier(self) -> Mapping[str, StaleContext]:
        """These contexts as they are kept there. Takes as long as reading them."""
        ...
