"""Export and import of contexts as archives: self-contained byte streams."""

import msgspec

from longleaf.tenants import DEFAULT_TENANT
from longleaf.types.contexts import Context


class ExportContext(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a context's archive, starting at a byte offset."""

    context: str
    offset: int = 0
    digest: str = ""
    """Digest of the archive to resume; empty accepts any."""
    with_keys: bool = True


class ExportedArchive(msgspec.Struct, frozen=True):
    """Description of an archive. Archives with the same digest have the same bytes."""

    num_bytes: int
    """Total size."""
    digest: str


class ImportHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an import. `total_bytes` is None if the size is unknown in advance; an `upload_id` makes the
    import resumable."""

    context: str | None = None
    """None: the original name of the context."""
    tenant: str = DEFAULT_TENANT
    """Owner of the new context. Set by the service, not by clients."""
    upload_id: str = ""
    total_bytes: int | None = None


class ArchiveChunk(msgspec.Struct, frozen=True):
    """A part of an archive, starting at `offset`."""

    offset: int
    data: bytes


class ImportProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an import; the last message has the context. In the first message, `received_bytes` is the offset to
    send from."""

    received_bytes: int
    context: Context | None = None
    key_tokens: int | None = None
    """Tokens whose keys and values the archive contains; the others are recomputed when the context is first used. None
    while unknown, and if an earlier call created the context."""


class ExportProgress(msgspec.Struct, frozen=True):
    """Progress of an export."""

    received_bytes: int
    """Includes the bytes before the offset."""
    archive: ExportedArchive
