"""Persists documents while they are being uploaded, so that clients can resume after a restart of the service."""

import asyncio
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Coroutine, Iterable
from typing import Any

import msgspec

from coordinator.handlers.document_tokenizer import DocumentTokenizer
from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.records import UploadKey, UploadRecord
from coordinator.task_set import TaskSet
from coordinator.text.encoder import StablePrefix
from longleaf.document_text import count_starts
from longleaf.errors import DataLoss, InvalidArgument, NotFound, StorageUnavailable
from longleaf.tenants import tenant_of
from longleaf.types import IngestHeader

KEEP_SECONDS = 7 * 86_400.0
"""Seconds after which a document that no client resumes is deleted."""
SWEEP_SECONDS = 3600.0
"""Seconds between two searches for expired documents."""
NEVER = 1 << 62
"""Placeholder for the number of persisted ids, if no more ids will be persisted."""
log = logging.getLogger(__name__)


class UploadState(msgspec.Struct, frozen=True):
    """The persisted header of a document. Its ids and the number of bytes that they cover are stored separately."""

    header: IngestHeader
    num_lead: int
    num_tokens: int | None = None
    """Number of ids of the document persisted so far; None in records of early versions."""


class _Size(msgspec.Struct, frozen=True):
    """The size field of an UploadState."""

    num_tokens: int | None = None


class DurableUploads:
    """Persists the stable prefixes of documents that have an upload id, asynchronously. `wall_clock` supplies the time
    of each update."""

    def __init__(
        self,
        catalog: Catalog,
        records: Iterable[UploadRecord],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`records` are those of earlier service processes."""
        self._catalog = catalog
        self._wall_clock = wall_clock
        self._records: dict[UploadKey, UploadRecord] = {}
        """The records on disk."""
        self._tokens = defaultdict[str, dict[UploadKey, int]](dict)
        """Token count of each record, by tenant."""
        for record in records:
            self._put(record, msgspec.msgpack.decode(record.header, type=_Size).num_tokens or 0)
        self._num_stored: dict[UploadKey, int] = {}
        """Number of ids that are persisted or being written, by upload."""
        self._tasks = defaultdict[UploadKey, TaskSet](TaskSet)
        """Pending writes of each upload."""
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the periodic removal of expired documents."""
        self._sweeping = asyncio.create_task(self._expire_loop())

    async def load(self, header: IngestHeader, document: DocumentTokenizer) -> None:
        """Resumes a new document from the persisted state, if there is any. Raises InvalidArgument if its settings
        differ from the original ones, and StorageUnavailable."""
        key = _key(header)
        if not header.upload_id:
            return
        if tasks := self._tasks.get(key):  # writes of an earlier call may be pending
            await asyncio.wait(tasks)  # the writes continue if this is cancelled
        if (record := self._records.get(key)) is None:
            self._num_stored.pop(key, None)
            return
        beginning = msgspec.msgpack.decode(record.header, type=UploadState)
        check_same(beginning.header, header)
        try:
            ids = await self._catalog.upload_ids(key)
            starts = await self._catalog.upload_starts(key)
            if beginning.num_tokens not in (None, len(ids)):
                raise DataLoss(f"upload {key[1]} of {key[0]}", f"it has {len(ids)} ids of {beginning.num_tokens}")
        except DataLoss as error:
            log.warning("%s", error)
            self.forget(header)
            return
        document.resume(ids, StablePrefix(record.settled_bytes, beginning.num_lead), starts)
        self._num_stored[key] = len(ids)

    def has(self, header: IngestHeader) -> bool:
        """Whether any part of an upload is persisted."""
        return _key(header) in self._records

    def tokens_of(self, tenant: str, besides: Container[UploadKey]) -> list[int]:
        """Token count of each upload of a tenant, except those in `besides`."""
        retained = self._tokens.get(tenant, {})
        return [num_tokens for key, num_tokens in retained.items() if key not in besides]

    def _put(self, record: UploadRecord, num_tokens: int) -> None:
        self._records[record.key] = record
        self._tokens[tenant_of(record.context)][record.key] = num_tokens

    def _pop(self, key: UploadKey) -> bool:
        """Returns whether there was a record."""
        if self._records.pop(key, None) is None:
            return False
        tenant = tenant_of(key[0])
        del self._tokens[tenant][key]
        if not self._tokens[tenant]:
            del self._tokens[tenant]
        return True

    def persist(self, header: IngestHeader, document: DocumentTokenizer) -> None:
        """Persists the new part of a document."""
        key, stable = _key(header), document.stable
        num_retained = self._num_stored.get(key, 0)
        if stable is None or not header.upload_id or document.num_tokens <= num_retained:
            return
        ids, self._num_stored[key] = document.token_ids[num_retained:], document.num_tokens
        starts = document.starts[count_starts(num_retained) :]
        record = UploadRecord(
            context=header.context,
            upload_id=header.upload_id,
            header=msgspec.msgpack.encode(UploadState(header, stable.num_lead, document.num_tokens)),
            settled_bytes=stable.num_bytes,
            updated=self._wall_clock(),
        )
        self._start(key, self._append(record, num_retained, ids, starts))

    def _start(self, key: UploadKey, work: Coroutine[Any, Any, None]) -> None:
        def end(_: asyncio.Task[None]) -> None:
            if not self._tasks[key]:
                del self._tasks[key]

        self._tasks[key].start(work).add_done_callback(end)

    async def _append(self, record: UploadRecord, start: int, ids: "array[int]", starts: "array[int]") -> None:
        """Writes ids from position `start` on. After a failed write, the catalog rejects later ones, because their ids
        do not follow the persisted ones."""
        try:
            await self._catalog.append_upload(record, start, ids, starts)
        except NotFound:  # its context was deleted in the meantime
            if record.key in self._num_stored:
                self._num_stored[record.key] = NEVER
        except (StorageUnavailable, DataLoss) as error:
            if self._num_stored.get(record.key, NEVER) != NEVER:  # the upload is running, and has not failed before
                log.warning("cannot save upload %s of %s any further: %s", record.upload_id, record.context, error)
                self._num_stored[record.key] = NEVER
        else:
            if record.key in self._num_stored:  # otherwise it has ended in the meantime
                self._put(record, start + len(ids))

    def forget(self, header: IngestHeader) -> bool:
        """Removes a document that is part of its context or will not be resumed. Returns whether any of it was
        persisted."""
        key = _key(header)
        is_retained = self._pop(key)
        is_retained = self._num_stored.pop(key, 0) > 0 or is_retained
        if is_retained:
            self._start(key, self._drop(key))
        return is_retained

    async def _drop(self, key: UploadKey) -> None:
        try:
            await self._catalog.drop_upload(key)
        except (StorageUnavailable, DataLoss) as error:
            log.warning("cannot delete upload %s of %s; it stays until the next start: %s", key[1], key[0], error)

    def drop_old(self) -> None:
        """Removes documents that have not been updated for KEEP_SECONDS."""
        now = self._wall_clock()
        for record in list(self._records.values()):
            if now - record.updated > KEEP_SECONDS:
                self._pop(record.key)
                self._num_stored.pop(record.key, None)
                self._start(record.key, self._drop(record.key))

    async def _expire_loop(self) -> None:
        while True:
            self.drop_old()
            await asyncio.sleep(SWEEP_SECONDS)

    async def close(self) -> None:
        """Returns when all writes are done."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*(tasks.wait() for tasks in self._tasks.values()))


def check_same(began: IngestHeader, header: IngestHeader) -> None:
    """Raises InvalidArgument if the settings of an upload differ from the original ones."""
    if began.append != header.append:
        raise InvalidArgument("config.append", "differs from the start of this upload")
    if began.system != header.system:
        raise InvalidArgument("prefaced_config.system", "differs from the start of this upload")
    if began.files and began.files != header.files:  # early clients sent no files
        raise InvalidArgument("config.files", "differ from those at the start of this upload")


def _key(header: IngestHeader) -> UploadKey:
    return header.context, header.upload_id
