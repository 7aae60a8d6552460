"""The persistent state of a service: the catalog and the journal in its data folder."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Self

from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.data_folder import JOURNAL, DataFolder
from coordinator.persistence.catalog.identity import read_identity
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.stale_contexts import StaleContexts
from coordinator.persistence.journal.journal import Journal
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from coordinator.persistence.snapshots.snapshots import Snapshots
from longleaf.config import DataConfig, EngineConfig
from longleaf.errors import CatalogError, DataLoss, StorageUnavailable
from longleaf.formatting import human_count
from longleaf.storage.store import Store

SNAPSHOTS = "snapshots"
log = logging.getLogger(__name__)


class PersistentState:
    """An open data folder, which is locked against other services."""

    def __init__(
        self,
        folder: DataFolder,
        catalog: Catalog,
        contents: CatalogContents,
        journal: Journal,
        stale: StaleContexts,
        snapshots: Snapshots,
        snapshot_url: str,
    ) -> None:
        self._folder = folder
        self.snapshots = snapshots
        self.snapshot_url = snapshot_url
        """The URL of the snapshots."""
        self.catalog = catalog
        self.contents = contents
        """The content of the catalog at the start."""
        self.journal = journal
        self.stale = stale
        """Contexts of earlier checkpoints of the model."""

    @classmethod
    async def open(cls, data: DataConfig, config: EngineConfig) -> Self:
        """Open the folder and load the catalog. Raises CatalogError, ModelRefused, and InvalidArgument for an invalid
        snapshot URL.
        """
        assert data.data_dir is not None
        model = await asyncio.to_thread(read_identity, Path(config.model), config.dtype)
        folder = await asyncio.to_thread(DataFolder.open, Path(data.data_dir), model.digest, config.model, model.facts)
        try:
            catalog = await Catalog.open(folder.database, reserve=folder.reserve)
            retained = await catalog.load()
            journal = await asyncio.to_thread(Journal, folder.path / JOURNAL, model.digest)
            stale = await asyncio.to_thread(StaleContexts, folder, config.model, model.facts)
            url = config.snapshot_url or str(folder.path / SNAPSHOTS)
            # a separate storage may be filled; the data folder must keep space for deletions
            rooms = () if config.snapshot_url else (folder.reserve.check,)
            store = await asyncio.to_thread(Store.open, url, probe=False)
        except StorageUnavailable as error:
            folder.close()
            raise CatalogError(str(error)) from error
        except BaseException:
            folder.close()
            raise
        snapshots = Snapshots(
            store, catalog, retained, model.digest, RetentionPolicy.from_config(data), time.time, *rooms
        )
        return cls(folder, catalog, retained, journal, stale, snapshots, url)

    async def record_address(self, address: str) -> None:
        """Record the address of this service for other services that want the folder."""
        try:
            await asyncio.to_thread(self._folder.record_address, address)
        except OSError as error:
            log.warning("cannot write the owner of %s: %s", self._folder.path, error)

    @property
    def notes(self) -> tuple[str, ...]:
        """The number of stored contexts, and the damaged ones, for the operator."""
        retained = self.contents
        num_tokens = sum(len(segment.token_ids) for segment in retained.segments)
        contexts = human_count(len(retained.contexts), "context")
        return (f"{self._folder.path} has {contexts}, {num_tokens:,} tokens", *describe_damage(retained))

    async def close(self) -> None:
        """Wait until everything is written, and release the folder."""
        await self.catalog.close()
        self._folder.close()


def describe_damage(contents: CatalogContents) -> list[str]:
    """Describe the unusable contents of a catalog."""
    found = [f"contexts/{name} is damaged: {reason}" for name, reason in contents.damaged_contexts.items()]
    for context in contents.contexts:
        try:
            contents.path(context)
        except DataLoss as error:
            found.append(str(error))
    return [*found, *contents.other_damage]
