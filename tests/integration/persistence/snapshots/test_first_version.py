"""Snapshots of the first version can be opened: segments are restored bit for bit, and contexts are rebuilt."""

from pathlib import Path

import pytest
import torch

from coordinator.persistence.catalog.rebuild_command import read_stored
from coordinator.persistence.catalog.rebuild_plan import choose_service, rebuild
from longleaf.storage.inventory import read_manifest
from longleaf.storage.manifest import PieceRef as Told
from longleaf.storage.store import Store
from tests.support.first_snapshots import (
    CHECKPOINT,
    KINDS,
    NUM_TOKENS,
    PIECES,
    SERVICE,
    WINDOWS,
    attempt,
    form,
    known,
    token_ids,
    write_first,
)
from tests.support.pools import BLOCK, POOLS
from workers.kv_cache.slots import KvPool
from workers.kv_io.kv_piece import KvPiece

FIXTURE = Path(__file__).parents[3] / "fixtures" / "snapshots" / "first"


def first() -> Store:
    return Store.open(str(FIXTURE), probe=False)


def restore(pool: KvPool, piece_ref: Told, runs: tuple) -> None:
    of_windows = runs == WINDOWS
    piece = KvPiece(
        piece_ref.name, first().get(piece_ref.name, piece_ref.digest), pool, piece_ref.runs, of_windows=of_windows
    )
    assert piece_ref.runs == tuple((run.start, run.end) for run in runs)
    numbers = piece.find(runs)
    assert numbers is not None
    piece.restore(pool, numbers, [block for run in runs for block in run.blocks])


@pytest.mark.parametrize("name", KINDS)
def test_segments_are_restored_bit_for_bit(name: str) -> None:
    manifest = read_manifest(first(), attempt(name).manifest)
    assert manifest.form == form(name), "ranks of this version can load it"
    assert manifest.token_ids == token_ids(name).tobytes()
    pool, wanted = POOLS[name](), known(name)
    for reported, runs in zip(manifest.pieces, PIECES, strict=True):
        restore(pool, reported, runs)
    if manifest.windows is not None:
        restore(pool, manifest.windows, WINDOWS)
    for of_windows, pieces in ((False, PIECES), (True, [WINDOWS])):
        blocks = [block for runs in pieces for run in runs for block in run.blocks]
        last = pieces[-1][-1].blocks[-1]
        for found, part in zip(pool.blocks(of_windows=of_windows), wanted.blocks(of_windows=of_windows), strict=True):
            whole = [block for block in blocks if block != last]
            assert torch.equal(found.tensor[:, whole], part.tensor[:, whole]), found.name
            in_use = slice(0, BLOCK - 1) if found.has_slots else slice(None)
            assert torch.equal(found.tensor[:, last, in_use], part.tensor[:, last, in_use]), found.name


def test_catalog_is_rebuilt_from_a_first_version_snapshot() -> None:
    stored = read_stored(first(), CHECKPOINT)
    assert not stored.damaged
    made = rebuild(stored, choose_service(stored, None))
    assert made.contents.service_id == SERVICE
    assert {each.id: (each.num_tokens, each.display_name) for each in made.contents.contexts} == {
        name: (NUM_TOKENS, f"{name} — 白鯨") for name in KINDS
    }
    assert [each.token_ids for each in made.contents.segments] == [token_ids(name) for name in KINDS]
    assert [each.form for each in made.contents.snapshots] == [form(name) for name in KINDS]
    assert made.contents.next_outgoing == 100
    assert not made.skipped


def test_this_version_writes_the_same_bytes(tmp_path: Path) -> None:
    """A change of the format must keep the files here and add new ones."""
    write_first(tmp_path / "again")
    found = {path.relative_to(tmp_path / "again"): path.read_bytes() for path in files(tmp_path / "again")}
    assert found == {path.relative_to(FIXTURE): path.read_bytes() for path in files(FIXTURE)}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
