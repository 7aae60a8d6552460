"""Rebuilding of lost catalogs from storage: request and report."""

import msgspec

from longleaf.config import DtypeName
from longleaf.types.contexts import SkippedContext


class Rebuild(msgspec.Struct, frozen=True, kw_only=True):
    """A request to rebuild the catalog of a model from storage."""

    url: str
    """Storage URL."""
    data_dir: str
    model: str
    """Checkpoint folder."""
    dtype: DtypeName = "auto"
    service: str | None = None
    """Id of the service that stored the contexts; None: the only one present."""
    may_replace: bool = False
    """Permits replacing an intact catalog that has contexts."""


class RestoredContext(msgspec.Struct, frozen=True):
    """A restored context."""

    name: str
    tokens: int


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the new catalog."""

    folder: str
    """The model's folder in the data folder."""
    service: str
    contexts: tuple[RestoredContext, ...]
    left_out: tuple[SkippedContext, ...]
    other_manifests: int
    """Number of manifests that were skipped because their keys belong to another checkpoint."""
    moved: tuple[str, ...]
    """New paths of the files that were moved to make way for the new catalog."""
