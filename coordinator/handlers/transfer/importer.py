"""The import of one context over any number of streams: the bytes of an archive become segments in the catalog and
objects on storage."""

import asyncio
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.persistence.catalog.records import SnapshotRecord, snapshot_record
from longleaf.context_archive.frames import FIELD
from longleaf.context_archive.reader import ArchiveReader, IdsSection, Section
from longleaf.context_archive.records import ID_BYTES, ContextHead, KvSection, SegmentHead
from longleaf.errors import CheckpointChanged, ContextLost, InvalidArgument, NotFound
from longleaf.fingerprint import TEXTS, Fingerprint
from longleaf.formatting import human_seconds
from longleaf.storage.context_record import ContextRecord, metadata_fields, sound_ends
from longleaf.storage.manifest import SegmentManifest, encode_manifest
from longleaf.storage.names import Attempt
from longleaf.storage.segment_record import SegmentRecord, with_ends
from longleaf.tenants import scoped
from longleaf.types import CONTEXT_ID, MAX_TIME, ImportHeader, ImportProgress

if TYPE_CHECKING:
    from coordinator.engine.context_transfer import ContextImport, ContextTransfer

MAX_LISTED = 3
"""Most file names to list in an error about differing checkpoints."""


class ContextImporter:
    """Imports the bytes of one archive. Calls must not overlap or be cancelled; work that a failed call left undone is
    done first by the next one. `wall_clock` counts seconds since the epoch."""

    def __init__(
        self,
        engine: "ContextTransfer",
        header: ImportHeader,
        vocabulary_size: int,
        wall_clock: Callable[[], float],
        quotas: QuotaEnforcer = UNLIMITED,
    ) -> None:
        self._quotas = quotas
        self._engine = engine
        self._header = header
        self._vocabulary_size = vocabulary_size
        self._wall_clock = wall_clock
        self._unpacking = ArchiveReader()
        self._pending_item: Section | None = None
        """The last item from the archive reader, until it has been processed."""
        self._context: ContextRecord | None = None
        self._import_handle: ContextImport | None = None
        self._segments: list[SegmentRecord] = []
        self._num_used = 0
        """Tokens of the path up to the end of the last segment."""
        self._current_segment: _IncomingSegment | None = None
        """The segment whose ids or pieces are arriving."""
        self._num_described = 0
        """Approximate bytes of memory of the segment descriptions."""
        self._manifests: dict[int, tuple[Attempt, SegmentManifest]] = {}
        self._snapshots: dict[int, SnapshotRecord] = {}
        """Snapshots whose manifests have been written."""
        self.result: ImportProgress | None = None
        """The final report; later bytes are ignored."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the archive received so far."""
        return self._unpacking.num_bytes

    @property
    def num_buffered_bytes(self) -> int:
        """Approximate bytes of memory held."""
        pending = len(self._pending_item) if isinstance(self._pending_item, bytearray) else 0
        current = [self._current_segment.token_ids] if self._current_segment is not None else []
        num_ids = sum(len(ids) for ids in (*(segment.token_ids for segment in self._segments), *current))
        return self._unpacking.num_buffered_bytes + pending + ID_BYTES * num_ids + self._num_described

    @property
    def _is_long(self) -> bool:
        """Whether parsing the current section may take long, so that it runs in a thread."""
        return self._unpacking.is_description

    async def commit(self) -> None:
        """Completes the work that an earlier call left undone. Raises the same errors as `feed`."""
        if self._pending_item is not None:
            await self._on_item(self._pending_item)
            self._pending_item = None

    async def feed(self, data: bytes) -> None:
        """Processes the next bytes, until the context is created. Raises InvalidArgument, CheckpointChanged,
        AlreadyExists, FailedPrecondition; and StorageUnavailable or Unavailable, after which the import may continue at
        `num_bytes`."""
        await self.commit()
        rest = memoryview(data)
        while rest and self.result is None:
            unpack = self._unpacking.feed
            count, self._pending_item = await asyncio.to_thread(unpack, rest) if self._is_long else unpack(rest)
            rest = rest[count:]
            await self.commit()

    async def finish(self) -> None:
        """Creates the context at the end of the archive. Raises the same errors as `feed`."""
        await self.commit()
        if self.result is not None:
            return
        self._unpacking.check_complete()
        assert self._context is not None and self._import_handle is not None
        for number, (attempt, manifest) in self._manifests.items():
            if number not in self._snapshots:
                await self._import_handle.put(attempt.manifest, await asyncio.to_thread(encode_manifest, manifest))
                self._snapshots[number] = snapshot_record(number, attempt.manifest, manifest)
        now, snapshots = self._wall_clock(), tuple(self._snapshots.values())
        record = replace(self._context, segment=self._segments[-1].id, last_used=now)
        with self._quotas.begin_document(1, record.num_tokens):
            context = await self._import_handle.adopt(record, self._segments, snapshots)
        self.result = ImportProgress(
            received_bytes=self.num_bytes, context=context, key_tokens=self._num_key_tokens(record.num_tokens)
        )
        self._segments, self._manifests, self._current_segment, self._num_described = (
            [],
            {},
            None,
            0,
        )  # the engine owns them now

    async def drop(self) -> None:
        """Drops the import. Idempotent; has no effect on a context that was created."""
        if self._import_handle is not None:
            await self._import_handle.drop()

    async def _on_item(self, on_progress: Section) -> None:
        match on_progress:
            case ContextHead():
                await self._open(on_progress)
            case SegmentHead():
                self._begin(on_progress)
            case IdsSection():
                await self._extend(on_progress.token_ids)
            case _:
                await self._put(on_progress)

    async def _open(self, head: ContextHead) -> None:
        name = self._header.context or scoped(self._header.tenant, _checked(head.context))
        if self._is_made(name):
            self.result = ImportProgress(received_bytes=self.num_bytes, context=self._engine.get_context(name))
            return
        _check_fingerprint(name, head, await self._engine.fingerprint())
        self._context = _record(name, head, self._header.upload_id, self._wall_clock())
        self._quotas.check_rate_in()
        self._quotas.check_context(1, self._context.num_tokens)
        self._import_handle = await self._engine.begin_import(self._context)
        self._unpacking.expect(self._import_handle.form, self._import_handle.block_size)

    def _is_made(self, name: str) -> bool:
        """Whether an earlier call with this upload id created the context."""
        try:
            return bool(self._header.upload_id) and self._engine.last_upload_id(name) == self._header.upload_id
        except (NotFound, ContextLost, CheckpointChanged):
            return False

    def _begin(self, head: SegmentHead) -> None:
        assert self._import_handle is not None
        self._current_segment = _IncomingSegment(self._import_handle.new_segment(), head)
        self._num_described += head.num_buffered_bytes
        if head.keys is not None:  # the manifest holds the token ids as well
            self._num_described += ID_BYTES * head.num_tokens

    async def _extend(self, token_ids: "array[int]") -> None:
        current = self._current_segment
        assert current is not None
        if max(token_ids) >= self._vocabulary_size:
            raise InvalidArgument(FIELD, f"it has a token id outside the vocabulary of {self._vocabulary_size:,}")
        current.token_ids += token_ids
        if len(current.token_ids) == current.head.num_tokens:
            await self._seal(current)

    async def _seal(self, current: "_IncomingSegment") -> None:
        """Completes a segment once all its token ids have arrived."""
        assert self._import_handle is not None
        before = self._segments[-1] if self._segments else None
        keys, text = current.head.keys, current.head.text
        if keys is None or keys.form != self._import_handle.form:  # without keys, the unused tail is not needed
            del current.token_ids[current.head.num_used :]
            keys = None
        if len(current.token_ids) < current.head.num_tokens:
            text = text and text.cut(len(current.token_ids))
        segment = SegmentRecord(
            id=current.id,
            parent=before and before.id,
            start=self._num_used,
            rope=current.head.rope,
            token_ids=current.token_ids,
            text=text,
        )
        if keys is not None:
            attempt = self._import_handle.new_attempt(segment.id)
            manifest = await asyncio.to_thread(self._manifest, attempt, segment, keys)
            self._manifests[segment.id], current.names = (attempt, manifest), [*manifest.objects]
        self._segments.append(segment)
        self._num_used += current.head.num_used

    def _manifest(self, attempt: Attempt, segment: SegmentRecord, keys: KvSection) -> SegmentManifest:
        assert self._import_handle is not None
        pieces = [replace(piece, name=attempt.piece(number)) for number, piece in enumerate(keys.pieces)]
        windows = keys.windows and replace(keys.windows, name=attempt.windows(0))
        fingerprint = self._import_handle.fingerprint
        manifest = SegmentManifest.of(attempt, segment, fingerprint, keys.form, pieces, windows)
        try:
            manifest.check()
            self._import_handle.check(manifest)
        except InvalidArgument as error:
            raise InvalidArgument(FIELD, f"the pieces of a segment are invalid: {error}") from error
        return manifest

    async def _put(self, content: bytearray) -> None:
        """Stores the next piece of a segment, if this engine accepts its keys."""
        assert self._import_handle is not None and self._current_segment is not None
        if self._current_segment.names:
            await self._import_handle.put(self._current_segment.names[0], content)
            del self._current_segment.names[0]

    def _num_key_tokens(self, num_tokens: int) -> int:
        """Tokens of the path whose keys and values were imported."""
        path = with_ends(self._segments, num_tokens)
        return sum(end - segment.start for segment, end in path if segment.id in self._snapshots)


class _IncomingSegment:
    """A segment whose token ids and pieces are arriving."""

    def __init__(self, number: int, head: SegmentHead) -> None:
        self.id = number
        self.head = head
        self.token_ids = array("I")
        self.names: list[str] = []
        """Object names of the pieces still to be stored."""


def _checked(name: str) -> str:
    """The name of the context in its original service. Raises InvalidArgument if the name is not valid here."""
    if CONTEXT_ID.fullmatch(name) is None:
        raise InvalidArgument(
            "config.name", f"the name {name[:100]!r} of the context is not valid here; give another name"
        )
    return name


def _record(name: str, head: ContextHead, upload_id: str, now: float) -> ContextRecord:
    """The record of the new context. Raises InvalidArgument if the archive's values are invalid."""
    times = (head.created, head.updated, *([] if head.expires is None else [head.expires]))
    if not all(0 <= time <= MAX_TIME for time in times):
        raise InvalidArgument(FIELD, "it has an invalid time")
    if (expiry := head.expiry) is not None and expiry <= now:
        raise InvalidArgument(FIELD, f"the context expired {human_seconds(now - expiry)} ago")
    metadata = metadata_fields(head, ends=sound_ends(head.ends, head.num_tokens) or (head.num_tokens,))
    return ContextRecord(id=name, segment=0, last_used=now, upload_id=upload_id, **metadata)


def _check_fingerprint(name: str, head: ContextHead, served: Fingerprint) -> None:
    """Raises CheckpointChanged with a list of the differing files."""
    given = head.fingerprint
    if given.digest == served.digest:
        return
    names = sorted({*given.files, *served.files}, key=lambda file: (file not in TEXTS, file))
    differing = [file for file in names if given.files.get(file) != served.files.get(file)]
    files = ", ".join(differing[:MAX_LISTED]) + (
        f" and {len(differing) - MAX_LISTED} more" if differing[MAX_LISTED:] else ""
    )
    models = f"{head.model[:100]!r} has fingerprint {given.digest[:16]}; the served checkpoint has {served.digest[:16]}"
    raise CheckpointChanged(f"contexts/{name}", f"{models}; they differ in {files or 'their tensors'}")
