"""Documents on their way, as far as they are kept: whoever sent them goes on with another service."""

import asyncio
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Coroutine, Iterable
from typing import Any

import msgspec

from coordinator.handlers.document_tokenizer import DocumentTokenizer
from coordinator.persistence.catalog.ports import UploadCatalog
from coordinator.persistence.catalog.records import UploadKey, UploadRecord
from coordinator.text.encoder import StablePrefix
from longleaf.document_text import count_starts
from longleaf.errors import DataLoss, InvalidArgument, NotFound, StorageUnavailable
from longleaf.tenants import tenant_of
from longleaf.types import IngestHeader

KEEP_SECONDS = 7 * 86_400.0
"""How long a document is kept that nobody goes on with."""
SWEEP_SECONDS = 3600.0
"""How often is looked for such."""
NEVER = 1 << 62
"""So many ids are kept, or about to be, where no more shall be."""
log = logging.getLogger(__name__)


class UploadState(msgspec.Struct, frozen=True):
    """What is kept of a document beside its ids and the bytes that they stand for."""

    header: IngestHeader
    num_lead: int
    num_tokens: int | None = None
    """Ids that are kept with it; early versions did not say."""


class _Size(msgspec.Struct, frozen=True):
    """Of a Beginning, its size alone."""

    num_tokens: int | None = None


class DurableUploads:
    """The documents with an upload id: what is settled of them is kept a little later. `wall_clock` dates them."""

    def __init__(
        self,
        catalog: UploadCatalog,
        records: Iterable[UploadRecord],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`records` are those of earlier services."""
        self._catalog = catalog
        self._wall_clock = wall_clock
        self._records: dict[UploadKey, UploadRecord] = {}
        """As they are kept."""
        self._tokens = defaultdict[str, dict[UploadKey, int]](dict)
        """Of each of them, by tenant."""
        for record in records:
            self._put(record, msgspec.msgpack.decode(record.header, type=_Size).num_tokens or 0)
        self._num_kept: dict[UploadKey, int] = {}
        """Ids that are kept, or about to be."""
        self._tasks = defaultdict[UploadKey, set[asyncio.Task[None]]](set)
        """What is being written of each."""
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """From here on those are dropped that nobody has gone on with for long."""
        self._sweeping = asyncio.create_task(self._drop_old_for_ever())

    async def take_up(self, header: IngestHeader, document: DocumentTokenizer) -> None:
        """Has a new document go on where an earlier service had come, if one had. Raises InvalidArgument when it began
        in another way, and StorageUnavailable."""
        key = _key(header)
        if not header.upload_id:
            return
        if tasks := self._tasks.get(key):  # what an earlier call has brought may not be kept yet
            await asyncio.wait(list(tasks))  # which goes on if this is cancelled
        if (record := self._records.get(key)) is None:
            self._num_kept.pop(key, None)
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
        document.go_on(ids, StablePrefix(record.settled_bytes, beginning.num_lead), starts)
        self._num_kept[key] = len(ids)

    def has(self, header: IngestHeader) -> bool:
        """Whether something of an upload is kept."""
        return _key(header) in self._records

    def tokens_of(self, tenant: str, besides: Container[UploadKey]) -> list[int]:
        """Tokens of each upload of a tenant, but for some."""
        retained = self._tokens.get(tenant, {})
        return [num_tokens for key, num_tokens in retained.items() if key not in besides]

    def _put(self, record: UploadRecord, num_tokens: int) -> None:
        self._records[record.key] = record
        self._tokens[tenant_of(record.context)][record.key] = num_tokens

    def _pop(self, key: UploadKey) -> bool:
        """Says whether there was one."""
        if self._records.pop(key, None) is None:
            return False
        tenant = tenant_of(key[0])
        del self._tokens[tenant][key]
        if not self._tokens[tenant]:
            del self._tokens[tenant]
        return True

    def keep(self, header: IngestHeader, document: DocumentTokenizer) -> None:
        """Takes note of how far a document has come."""
        key, stable = _key(header), document.settled
        num_retained = self._num_kept.get(key, 0)
        if stable is None or not header.upload_id or document.num_tokens <= num_retained:
            return
        ids, self._num_kept[key] = document.token_ids[num_retained:], document.num_tokens
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
        task = asyncio.create_task(work)
        self._tasks[key].add(task)  # the loop itself keeps only weak references

        def end(task: asyncio.Task[None]) -> None:
            self._tasks[key].discard(task)
            if not self._tasks[key]:
                del self._tasks[key]

        task.add_done_callback(end)

    async def _append(self, record: UploadRecord, start: int, ids: "array[int]", starts: "array[int]") -> None:
        """What comes behind one that could not be kept is refused, as its ids do not follow those that are."""
        try:
            await self._catalog.append_upload(record, start, ids, starts)
        except NotFound:  # its context was deleted meanwhile
            if record.key in self._num_kept:
                self._num_kept[record.key] = NEVER
        except (StorageUnavailable, DataLoss) as error:
            if self._num_kept.get(record.key, NEVER) != NEVER:  # it is still on its way, and this is its first failure
                log.warning("upload %s of %s is not kept from here on: %s", record.upload_id, record.context, error)
                self._num_kept[record.key] = NEVER
        else:
            if record.key in self._num_kept:  # else it has ended meanwhile
                self._put(record, start + len(ids))

    def forget(self, header: IngestHeader) -> bool:
        """A document is part of its context, or nobody will go on with it. Says whether something of it was kept."""
        key = _key(header)
        is_retained = self._pop(key)
        is_retained = self._num_kept.pop(key, 0) > 0 or is_retained
        if is_retained:
            self._start(key, self._drop(key))
        return is_retained

    async def _drop(self, key: UploadKey) -> None:
        try:
            await self._catalog.drop_upload(key)
        except (StorageUnavailable, DataLoss) as error:
            log.warning("upload %s of %s is kept until the next start: %s", key[1], key[0], error)

    def drop_old(self) -> None:
        """Drops what nobody has gone on with for long."""
        now = self._wall_clock()
        for record in list(self._records.values()):
            if now - record.updated > KEEP_SECONDS:
                self._pop(record.key)
                self._num_kept.pop(record.key, None)
                self._start(record.key, self._drop(record.key))

    async def _drop_old_for_ever(self) -> None:
        while True:
            self.drop_old()
            await asyncio.sleep(SWEEP_SECONDS)

    async def close(self) -> None:
        """Returns when all is kept."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*(task for tasks in self._tasks.values() for task in tasks), return_exceptions=True)


def check_same(began: IngestHeader, header: IngestHeader) -> None:
    """Raises InvalidArgument when an upload goes on in another way than it began."""
    if began.append != header.append:
        raise InvalidArgument("config.append", "is not what this upload began with")
    if began.system != header.system:
        raise InvalidArgument("prefaced_config.system", "is not what this upload began with")
    if began.files and began.files != header.files:  # early clients told of none
        raise InvalidArgument("config.files", "are not those that this upload began with")


def _key(header: IngestHeader) -> UploadKey:
    return header.context, header.upload_id
