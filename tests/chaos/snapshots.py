"""The snapshots of a service that can be hurt: points where they are kept, and what is kept of which segment."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from coordinator.persistence.catalog.records import Change
from coordinator.persistence.snapshots.snapshots import Snapshots
from longleaf.storage.inventory import read_manifest
from longleaf.storage.names import attempt_of_manifest, segments_folder
from longleaf.storage.store import Store
from tests.chaos.points import DELETE, MANIFEST, NOTE, RECORDED, WRITTEN, Points
from tests.chaos.views import Look

GRACE_SECONDS = 8.0
"""After which what nobody needs is swept, at the start of a service."""


class SnapshotProbe:
    """Looks into the snapshots of an engine that has not begun."""

    def __init__(self, snapshots: Snapshots, points: Points) -> None:
        self._snapshots: Any = snapshots
        self._points = points
        self._is_sent = False
        inside = self._snapshots
        inside._policy = replace(inside._policy, grace=GRACE_SECONDS)
        inside._store.put = partial(self._put, inside._store.put)
        inside._store.delete = partial(self._delete, inside._store.delete)
        inside._catalog.commit = partial(self._commit, inside._catalog.commit)
        inside._sender._send_some = partial(self._send_some, inside._sender._send_some)

    async def _put(self, put: Any, name: str, content: bytes, *, is_new: bool = False) -> None:
        is_manifest = attempt_of_manifest(name) is not None
        self._points.reach(MANIFEST if is_manifest else NOTE)
        await put(name, content, is_new=is_new)
        if is_manifest:
            self._points.reach(WRITTEN)

    async def _delete(self, delete: Any, names: Sequence[str]) -> None:
        self._points.reach(DELETE)
        await delete(names)

    async def _commit(self, commit: Any, change: Change) -> Any:
        committed = await commit(change)
        if change.snapshots:
            self._points.reach(RECORDED)
        return committed

    async def _send_some(self, send_some: Any) -> bool:
        self._is_sent = False
        self._is_sent = not (found := await send_some())
        return found

    @property
    def busy(self) -> dict[str, object]:
        """What there is to do; nothing of it is where a value is false."""
        inside = self._snapshots
        is_sent = self._is_sent and not inside._sender._there_is_more.is_set()
        return {"to save": list(inside._wanted), "attempts": len(inside._attempts), "to send": not is_sent}

    @property
    def records(self) -> dict[int, str]:
        """The manifest of each segment that is on storage."""
        return {record.segment: record.manifest for record in self._snapshots._records.all}


def folder_of(data: Path) -> Path:
    """Where the only model of a data folder has its snapshots."""
    (found,) = data.glob("*/snapshots")
    return found


def check_snapshots(data: Path, look: Look) -> None:
    """All that contexts are made of is on storage, as it was written."""
    needed = {segment for path in look.paths.values() for segment, _, _ in path}
    missing = needed - look.snapshots.keys()
    assert not missing, f"segments {sorted(missing)} are not on storage"
    store = Store.open(str(folder_of(data)))
    for segment in needed:
        manifest = read_manifest(store, look.snapshots[segment])
        for piece in (*manifest.pieces, *([manifest.windows] if manifest.windows else [])):
            store.get(piece.name, piece.digest)


def orphans(data: Path, look: Look) -> set[str]:
    """Folders of attempts that nothing tells of."""
    folder = folder_of(data)
    reported = {name.rpartition("/")[0] for name in look.snapshots.values()}
    service = next(iter(look.snapshots.values())).split("/")[1]
    found = {str(path.parent.relative_to(folder)) for path in (folder / segments_folder(service)).glob("*/*/*")}
    return found - reported


# --- what is done to it while no service is there ---

Harm = Callable[[Path, Random], None]


def _some(folder: Path, pattern: str, random: Random) -> list[Path]:
    """About half of these files, one at least."""
    found = sorted(folder.rglob(pattern))
    return random.sample(found, max(1, len(found) // 2))


def cut_pieces(folder: Path, random: Random) -> None:
    for path in _some(folder, "*.safetensors", random):
        os.truncate(path, random.randrange(path.stat().st_size))


def flip_bits(folder: Path, random: Random) -> None:
    """Of pieces and manifests."""
    for path in [*_some(folder, "*.safetensors", random), *_some(folder, "manifest", random)]:
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)


def lose_files(folder: Path, random: Random) -> None:
    for path in {*_some(folder, "*.safetensors", random), *_some(folder, "manifest", random)}:
        path.unlink()


def lose_all(folder: Path, random: Random) -> None:
    """As a disk that was replaced by an empty one."""
    del random
    shutil.rmtree(folder)


def contents(folder: Path) -> bytes:
    """Of all files below it that are there when they are read."""
    found = b""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):
            found += path.read_bytes()
    return found
