"""What of a service outlives it: the catalog and the journal in its data folder."""

import asyncio
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

from blake3 import blake3

from coordinator.catalog.catalog import Catalog, read_only_catalog
from coordinator.catalog.folder import DataFolder
from coordinator.catalog.records import Kept
from coordinator.journal.journal import Journal
from coordinator.snapshots.policy import Policy
from coordinator.snapshots.snapshots import Snapshots
from longleaf.config import DataConfig, EngineConfig
from longleaf.errors import CatalogError, DataLoss, StorageUnavailable
from longleaf.fingerprint import CONFIG, Fingerprint, read_fingerprint
from longleaf.storage.store import Store

JOURNAL, SNAPSHOTS, DTYPE = "journal", "snapshots", "dtype"
log = logging.getLogger(__name__)


class Durability:
    """An open data folder, which no other service has at the same time."""

    def __init__(
        self,
        folder: DataFolder,
        catalog: Catalog,
        kept: Kept,
        journal: Journal,
        changed: dict[str, str],
        snapshots: Snapshots,
        snapshot_url: str,
    ) -> None:
        self._folder = folder
        self.snapshots = snapshots
        self.snapshot_url = snapshot_url
        """Where they lie."""
        self.catalog = catalog
        self.kept = kept
        """What was there at the start."""
        self.journal = journal
        self.changed = changed
        """Contexts that were kept for what lay in the model's folder before, and what differs since."""

    @classmethod
    async def open(cls, data: DataConfig, config: EngineConfig) -> Self:
        """Takes as long as reading what is kept. Raises CatalogError, ModelRefused, and InvalidArgument for a wrong URL
        of snapshots."""
        assert data.data_dir is not None
        found = await asyncio.to_thread(read_fingerprint, Path(config.model))
        facts = _facts(config, found)
        digest = blake3(f"{found.digest} {facts[DTYPE]}".encode()).hexdigest()
        folder = await asyncio.to_thread(DataFolder.open, Path(data.data_dir), digest, config.model, facts)
        try:
            catalog = await Catalog.open(folder.database)
            kept = await catalog.load()
            journal = await asyncio.to_thread(Journal, folder.path / JOURNAL, digest)
            changed = await asyncio.to_thread(_changed, folder, config.model, facts)
            url = config.snapshot_url or str(folder.path / SNAPSHOTS)
            store = await asyncio.to_thread(Store.open, url, is_tried=False)
        except StorageUnavailable as error:
            folder.close()
            raise CatalogError(str(error)) from error
        except BaseException:
            folder.close()
            raise
        snapshots = Snapshots(store, catalog, kept, digest, Policy.of(data), time.time)
        return cls(folder, catalog, kept, journal, changed, snapshots, url)

    async def tell_address(self, address: str) -> None:
        """Has others who want the folder be told who has it."""
        try:
            await asyncio.to_thread(self._folder.tell_address, address)
        except OSError as error:
            log.warning("others are not told who has %s: %s", self._folder.path, error)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is there, and what is damaged, for people."""
        kept = self.kept
        num_tokens = sum(len(segment.token_ids) for segment in kept.segments)
        contexts = "1 context" if len(kept.contexts) == 1 else f"{len(kept.contexts):,} contexts"
        return (f"{self._folder.path} keeps {contexts}, {num_tokens:,} tokens", *damages(kept))

    async def close(self) -> None:
        """Ends when all is written."""
        await self.catalog.close()
        self._folder.close()


def _changed(folder: DataFolder, model: str, facts: dict[str, str]) -> dict[str, str]:
    """The contexts that other folders keep for what this model's folder held before, and what differs since."""
    found = dict[str, str]()
    for path, told in folder.siblings():
        if told.model == model:
            with suppress(CatalogError):  # that folder is no business of this service
                differing = sorted(name for name in {*facts, *told.facts} if facts.get(name) != told.facts.get(name))
                why = f"{', '.join(differing)} in {model} changed since; serve that again, or ingest the text anew"
                found |= {context.id: why for context in read_only_catalog(path).contexts}
    return found


def damages(kept: Kept) -> list[str]:
    """What of a catalog cannot be used, in words."""
    found = [f"contexts/{name} is damaged: {reason}" for name, reason in kept.damaged_contexts.items()]
    for context in kept.contexts:
        try:
            kept.path(context)
        except DataLoss as error:
            found.append(str(error))
    return [*found, *kept.other_damage]


def _facts(config: EngineConfig, found: Fingerprint) -> dict[str, str]:
    """What a model is told from others by. Raises ModelRefused."""
    dtype = _own_dtype(Path(config.model)) if config.dtype == "auto" else config.dtype
    return found.files | {DTYPE: dtype}


def _own_dtype(folder: Path) -> str:
    """The numeric type that a checkpoint names; empty where it names none."""
    config = cast(dict[str, Any], json.loads((folder / CONFIG).read_bytes()))
    texts = cast(dict[str, Any], config.get("text_config") or {})
    found = (texts.get(name) or config.get(name) for name in ("dtype", "torch_dtype"))
    return next((str(name) for name in found if name), "")
