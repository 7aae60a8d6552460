"""Contexts stored for previous contents of a model folder: other weights, or another dtype or tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from coordinator.persistence.catalog.catalog import read_only_catalog
from coordinator.persistence.catalog.data_folder import DataFolder
from coordinator.persistence.catalog.records import CatalogContents
from longleaf.errors import CatalogError
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that define the meaning of token ids."""


class StaleContext(msgspec.Struct, frozen=True, kw_only=True):
    """A context in the folder of an earlier checkpoint."""

    record: ContextRecord
    contents: CatalogContents
    """All records of this folder."""
    model: str
    """The folder of both checkpoints."""
    differing: tuple[str, ...]
    """The files that differ, and the dtype if it differs; sorted."""

    @property
    def path(self) -> tuple[SegmentRecord, ...]:
        """The path of the context. Raises DataLoss."""
        return self.contents.path(self.record)

    @property
    def changes(self) -> str:
        """The differences, with a remedy."""
        changed = f"{', '.join(self.differing)} in {self.model} changed after it was ingested"
        if self.has_other_text:
            return f"{changed}; serve the previous checkpoint, or ingest the text again"
        return f"{changed}; serve the previous checkpoint, or recompute the context (longleaf contexts recompute)"

    @property
    def has_other_text(self) -> bool:
        """Whether its ids may mean another text now."""
        return any(name in self.differing for name in TOKENIZER_FILES)


class StaleContexts:
    """The contexts of all earlier checkpoints of a model. Reading them blocks on the disk."""

    def __init__(self, folder: DataFolder, model: str, facts: Mapping[str, str]) -> None:
        """`facts` are the inputs of the served checkpoint's fingerprint."""
        self._folder = folder
        self._model = model
        self._facts = facts
        self.changed = {name: each.changes for name, each in self.read().items()}
        """The contexts at the start, by name, and the differences from the served checkpoint."""

    def read(self) -> dict[str, StaleContext]:
        """By name; of several, the one that was changed last. Unreadable folders are skipped, because they do not
        belong to this service."""
        found = dict[str, StaleContext]()
        for context in self._all():
            name = context.record.id
            if name not in found or found[name].record.updated < context.record.updated:
                found[name] = context
        return found

    def _all(self) -> Iterator[StaleContext]:
        for path, model_file in self._folder.other_models():
            if model_file.model != self._model:
                continue
            names = {*self._facts, *model_file.facts}
            differing = sorted(name for name in names if self._facts.get(name) != model_file.facts.get(name))
            with suppress(CatalogError):
                retained = read_only_catalog(path)
                for record in retained.contexts:
                    yield StaleContext(record=record, contents=retained, model=self._model, differing=tuple(differing))
