"""Fake engines that export and import contexts, and archives as streams of requests."""

from collections.abc import AsyncIterator

from longleaf.storage.context_record import ContextRecord, metadata_fields
from longleaf.types import ArchiveChunk, ImportHeader
from tests.support.archives import FINGERPRINT, FORM, Packable
from tests.support.fakes.transfer_engine import FakeTransferEngine, StoredContext


def empty_transfer_engine(form: str | None = FORM, service: str = "new") -> FakeTransferEngine:
    """An engine without contexts, with the checkpoint of `tests.support.archives`."""
    return FakeTransferEngine(FINGERPRINT, form, service)


def transfer_engine_of(*contexts: Packable) -> FakeTransferEngine:
    """An engine with these contexts."""
    transfers = empty_transfer_engine(service="old")
    for packable in contexts:
        head = packable.head
        record = ContextRecord(
            id=head.context,
            segment=packable.path[-1].id,
            last_used=3.5,
            num_hits=4,
            **metadata_fields(head),
        )
        transfers.contexts[head.context] = StoredContext(record, packable.path, packable.manifests)
        transfers.objects |= packable.objects
    return transfers


async def sending(
    header: ImportHeader | None, data: bytes, start: int = 0, size: int = 100, end: int | None = None
) -> AsyncIterator[ImportHeader | ArchiveChunk]:
    """A header, and the bytes of an archive from `start` up to `end` in pieces of `size` bytes."""
    if header is not None:
        yield header
    end = len(data) if end is None else end
    for at in range(start, end, size):
        yield ArchiveChunk(at, data[at : min(at + size, end)])
