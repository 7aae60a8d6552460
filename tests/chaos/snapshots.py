"""Snapshots of a service under fault injection: fault points in their writes, and checks of their contents."""

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
"""Age from which a new service collects unreferenced objects."""


class SnapshotProbe:
    """Reads the snapshots of an engine before it starts."""

    def __init__(self, snapshots: Snapshots, points: Points) -> None:
        self._snapshots: Any = snapshots
        self._points = points
        self._is_sent = False
        inside = self._snapshots
        inside._collector._policy = replace(inside._policy, grace=GRACE_SECONDS)
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
        """Pending work by name; false values mean none."""
        inside = self._snapshots
        is_sent = self._is_sent and not inside._sender._there_is_more.is_set()
        return {"to save": list(inside._wanted), "attempts": len(inside._attempts), "to send": not is_sent}

    @property
    def records(self) -> dict[int, str]:
        """The manifest of each segment on storage."""
        return {record.segment: record.manifest for record in self._snapshots._records.all}


def folder_of(data: Path) -> Path:
    """Snapshot folder of the only model in a data folder."""
    (found,) = data.glob("*/snapshots")
    return found


def check_snapshots(data: Path, look: Look) -> None:
    """Checks that storage holds all segments of all contexts, unchanged."""
    needed = {segment for path in look.paths.values() for segment, _, _ in path}
    missing = needed - look.snapshots.keys()
    assert not missing, f"segments {sorted(missing)} are not on storage"
    store = Store.open(str(folder_of(data)))
    for segment in needed:
        manifest = read_manifest(store, look.snapshots[segment])
        for piece in manifest.all_pieces:
            store.get(piece.name, piece.digest)


def orphans(data: Path, look: Look) -> set[str]:
    """Folders of attempts without a reference."""
    folder = folder_of(data)
    reported = {name.rpartition("/")[0] for name in look.snapshots.values()}
    service = next(iter(look.snapshots.values())).split("/")[1]
    found = {str(path.parent.relative_to(folder)) for path in (folder / segments_folder(service)).glob("*/*/*")}
    return found - reported


# --- damage while no service runs ---

Harm = Callable[[Path, Random], None]


def _some(folder: Path, pattern: str, random: Random) -> list[Path]:
    """About half of these files, at least one."""
    found = sorted(folder.rglob(pattern))
    return random.sample(found, max(1, len(found) // 2))


def cut_pieces(folder: Path, random: Random) -> None:
    for path in _some(folder, "*.safetensors", random):
        os.truncate(path, random.randrange(path.stat().st_size))


def flip_bits(folder: Path, random: Random) -> None:
    """Flips bits in pieces and manifests."""
    for path in [*_some(folder, "*.safetensors", random), *_some(folder, "manifest", random)]:
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)


def lose_files(folder: Path, random: Random) -> None:
    for path in {*_some(folder, "*.safetensors", random), *_some(folder, "manifest", random)}:
        path.unlink()


def lose_all(folder: Path, random: Random) -> None:
    """Like a disk that was replaced by an empty one."""
    del random
    shutil.rmtree(folder)


def contents(folder: Path) -> bytes:
    """Contents of all files below `folder`; skips those that vanish meanwhile."""
    found = b""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):
            found += path.read_bytes()
    return found
