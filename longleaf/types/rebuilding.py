"""Catalogs that are made anew: what is asked, and what came of it."""

import msgspec

from longleaf.config import DtypeName
from longleaf.types.contexts import SkippedContext


class Rebuild(msgspec.Struct, frozen=True, kw_only=True):
    """Make the catalog of a model anew from what lies on storage."""

    url: str
    """Of the storage."""
    data_dir: str
    model: str
    """Folder of the checkpoint."""
    dtype: DtypeName = "auto"
    service: str | None = None
    """Id of the service that kept the contexts; None: the only one there."""
    may_replace: bool = False
    """Also a catalog that is sound and has contexts."""


class RestoredContext(msgspec.Struct, frozen=True):
    """A context that is there again."""

    name: str
    tokens: int


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the new catalog holds."""

    folder: str
    """Of the model, in the data folder."""
    service: str
    contexts: tuple[RestoredContext, ...]
    left_out: tuple[SkippedContext, ...]
    other_manifests: int
    """That were passed over, because another checkpoint's keys lie under them."""
    moved: tuple[str, ...]
    """Where that lies now which was in the place of the new catalog."""
