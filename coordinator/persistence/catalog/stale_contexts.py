"""Contexts stored for previous contents of a model folder: other weights, or another dtype or tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from coordinator.persistence.catalog.catalog import read_only_catalog
from coordinator.persistence.catalog.data_folder import DataFolder
from coordinator.persistence.catalog.records import CatalogContents, ContextRecord, SegmentRecord
from longleaf.errors import CatalogError

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


def read_stale(folder: DataFolder, model: str, facts: Mapping[str, str]) -> dict[str, StaleContext]:
    """By name; of several, the one that was changed last. Unreadable folders are skipped, because they do not belong to
    this service."""
    found = dict[str, StaleContext]()
    for context in _all(folder, model, facts):
        name = context.record.id
        if name not in found or found[name].record.updated < context.record.updated:
            found[name] = context
    return found


def _all(folder: DataFolder, model: str, facts: Mapping[str, str]) -> Iterator[StaleContext]:
    for path, model_file in folder.other_models():
        if model_file.model != model:
            continue
        differing = tuple(
            sorted(name for name in {*facts, *model_file.facts} if facts.get(name) != model_file.facts.get(name))
        )
        with suppress(CatalogError):
            retained = read_only_catalog(path)
            for record in retained.contexts:
                yield StaleContext(record=record, contents=retained, model=model, differing=differing)
