"""Contexts that move house, as parcels: streams of bytes that tell all of them."""

import msgspec

from longleaf.tenants import DEFAULT_TENANT
from longleaf.types.contexts import Context


class ExportContext(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a context's parcel from a byte on."""

    context: str
    offset: int = 0
    digest: str = ""
    """Of the parcel that is gone on with; empty: whatever it is."""
    with_keys: bool = True


class ExportedArchive(msgspec.Struct, frozen=True):
    """What comes: parcels of the same digest have the same bytes."""

    num_bytes: int
    """All of it."""
    digest: str


class ImportHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an import. `total_bytes` is None when the size is not known beforehand; an `upload_id`
    makes the import resumable."""

    context: str | None = None
    """None: the name that the context had."""
    tenant: str = DEFAULT_TENANT
    """Whose it will be. The service knows; a client does not say."""
    upload_id: str = ""
    total_bytes: int | None = None


class ArchiveChunk(msgspec.Struct, frozen=True):
    """Some bytes of a parcel, from `offset` on."""

    offset: int
    data: bytes


class ImportProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an import is; the last one has the context. Of the first one, `received_bytes` tells where to send
    from."""

    received_bytes: int
    context: Context | None = None
    key_tokens: int | None = None
    """Tokens whose keys and values came along; the others are read again when the context is first asked. None while
    that is not known, and where an earlier call made the context."""


class ExportProgress(msgspec.Struct, frozen=True):
    """How far an export is."""

    received_bytes: int
    """Those that lie before the offset among them."""
    parcel: ExportedArchive
