"""What of a service outlives it: the catalog and the journal in its data folder."""

import json
from pathlib import Path
from typing import Any, Self, cast

from coordinator.catalog.catalog import Catalog
from coordinator.catalog.folder import DataFolder, ModelFacts
from coordinator.journal.journal import Journal
from longleaf.config import EngineConfig
from longleaf.errors import CatalogError, StorageUnavailable
from longleaf.fingerprint import CONFIG, read_fingerprint

JOURNAL = "journal"


class Durability:
    """An open data folder, which no other service has at the same time."""

    def __init__(self, folder: DataFolder, catalog: Catalog, journal: Journal) -> None:
        self._folder = folder
        self.catalog = catalog
        self.journal = journal

    @classmethod
    def open(cls, data_dir: Path, config: EngineConfig) -> Self:
        """Takes as long as reading what is kept. Raises CatalogError and ModelRefused."""
        facts = _facts(config)
        folder = DataFolder.open(data_dir.expanduser().absolute(), facts)
        try:
            catalog = Catalog.open(folder.path)
            return cls(folder, catalog, Journal(folder.path / JOURNAL, facts.fingerprint))
        except StorageUnavailable as error:
            folder.close()
            raise CatalogError(str(error)) from error
        except BaseException:
            folder.close()
            raise

    def tell_address(self, address: str) -> None:
        """Has others who want the folder be told who has it. Raises CatalogError."""
        self._folder.tell_address(address)

    @property
    def note(self) -> str:
        """What is there, for people."""
        kept = self.catalog.kept
        num_tokens = sum(len(segment.token_ids) for segment in kept.segments)
        damaged = "".join(f"; context {name} is damaged: {why}" for name, why in kept.damaged)
        contexts = "1 context" if len(kept.contexts) == 1 else f"{len(kept.contexts):,} contexts"
        return f"{self._folder.path} keeps {contexts}, {num_tokens:,} tokens{damaged}"

    async def close(self) -> None:
        """Ends when all is written."""
        await self.catalog.close()
        self._folder.close()


def _facts(config: EngineConfig) -> ModelFacts:
    """What keys depend on. Raises ModelRefused."""
    folder = Path(config.model)
    found = read_fingerprint(folder)
    dtype = _own_dtype(folder) if config.dtype == "auto" else config.dtype
    return ModelFacts(folder=str(folder), fingerprint=found.digest, files=found.files, dtype=dtype)


def _own_dtype(folder: Path) -> str:
    """The numeric type that a checkpoint names; empty where it names none."""
    config = cast(dict[str, Any], json.loads((folder / CONFIG).read_bytes()))
    texts = cast(dict[str, Any], config.get("text_config") or {})
    found = (texts.get(name) or config.get(name) for name in ("dtype", "torch_dtype"))
    return next((str(name) for name in found if name), "")
