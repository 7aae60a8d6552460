"""Segments of every kind as the first version of snapshots wrote them, by ranks with known bits.

`python -m tests.support.first_snapshots FOLDER` makes the files in tests/fixtures/snapshots/first. These never change:
a change of the snapshot format adds another folder, and later versions open all of them.
"""

import sys
from array import array
from pathlib import Path

import torch

from longleaf.positions import EVERY_RANK, OWN_ROPE
from longleaf.runs import Run
from longleaf.storage.context_note import ContextNote, encode_note
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import PieceRef, SegmentManifest, encode_manifest
from longleaf.storage.names import Attempt, NotePlace
from longleaf.storage.store import Store
from tests.support.pools import BLOCK, POOLS
from workers.kv_cache.slots import KvPool
from workers.kv_io.kv_piece import HostCopy, form_of

SERVICE = "0123456789abcdef0123456789abcdef"
CHECKPOINT = "ab" * 32
KINDS = [name for name in POOLS if name not in ("windows alone", "narrow values")]
NUM_TOKENS = 20
PIECES = ((Run(0, 0, 9, (5, 2, 6)),), (Run(1, 9, 12, (0,)), Run(1, 12, 20, (3, 4, 1))))
"""A run on each of two ranks, and where they lie there."""
WINDOWS = (Run(EVERY_RANK, 6, 20, (6, 1, 0, 3, 2)),)


def known(name: str) -> KvPool:
    """A pool in whose blocks lie bits that are the same everywhere and for ever."""
    pool = POOLS[name]()
    for of_windows in (False, True):
        for part, tensor, _ in pool.blocks(of_windows=of_windows):
            bits = torch.arange(tensor.numel()).view(tensor.shape) * 7 + sum(map(ord, part))
            tensor.copy_(bits % 121 - 60 if tensor.dtype == torch.int8 else (bits % 121 - 60) / 8)
    return pool


def token_ids(name: str) -> "array[int]":
    return array("I", [KINDS.index(name) * 1000 + i for i in range(NUM_TOKENS)])


def attempt(name: str) -> Attempt:
    return Attempt(SERVICE, f"{SERVICE}-{KINDS.index(name)}", "first")


def form(name: str) -> str:
    """The form that ranks with such a pool report."""
    pool = POOLS[name]()
    return "|".join([form_of(pool, of_windows=False), form_of(pool, of_windows=True)])


def write_first(folder: Path) -> None:
    store = Store.open(str(folder))
    for name in KINDS:
        _write_segment(store, name)
        number = KINDS.index(name)
        record = ContextRecord(
            id=name,
            segment=number,
            num_tokens=NUM_TOKENS,
            ends=(NUM_TOKENS,),
            capacity=4096,
            created=1.5,
            updated=2.5,
            last_used=2.5,
            display_name=f"{name} — 白鯨",
        )
        note = ContextNote(NotePlace(SERVICE, name, number), record)
        store.put(note.place.name, [encode_note(note)])
    gone = ContextNote(NotePlace(SERVICE, "gone", 99), None)
    store.put(gone.place.name, [encode_note(gone)])


def _write_segment(store: Store, name: str) -> None:
    pool, where = known(name), attempt(name)
    has_windows = bool(pool.blocks(of_windows=True))
    pieces = [_write_piece(store, pool, where.piece(i), runs) for i, runs in enumerate(PIECES)]
    manifest = SegmentManifest(
        service=SERVICE,
        fingerprint=CHECKPOINT,
        form=form(name),
        segment=where.segment,
        parent=None,
        start=0,
        num_tokens=NUM_TOKENS,
        rope=OWN_ROPE,
        pieces=tuple(pieces),
        windows=_write_piece(store, pool, where.windows(0), WINDOWS, of_windows=True) if has_windows else None,
        token_ids=token_ids(name).tobytes(),
    )
    store.put(where.manifest, [encode_manifest(manifest)], is_new=True)


def _write_piece(store: Store, pool: KvPool, name: str, runs: tuple[Run, ...], *, of_windows: bool = False) -> PieceRef:
    written = store.put(name, HostCopy(pool, runs, of_windows=of_windows).parts())
    return PieceRef(
        name=name, runs=tuple((run.start, run.end) for run in runs), num_bytes=written.num_bytes, digest=written.digest
    )


if __name__ == "__main__":
    assert BLOCK == 3, "PIECES are cut so"
    write_first(Path(sys.argv[1]))
