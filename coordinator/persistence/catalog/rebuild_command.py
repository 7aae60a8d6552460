"""Rebuilds a catalog: `python -m coordinator.persistence.catalog.rebuild_command '{"url": URL, "data_dir": DIR,
"model": DIR}'` reads a Rebuild and prints a RebuildReport. `longleaf contexts rebuild` is the same command with a
help page.

Exit code 0: rebuilt; 2: the request is invalid; 1: the storage cannot be reached now.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from coordinator.persistence.catalog.catalog import read_only_catalog
from coordinator.persistence.catalog.data_folder import JOURNAL, DataFolder
from coordinator.persistence.catalog.database import Database
from coordinator.persistence.catalog.identity import read_identity
from coordinator.persistence.catalog.rebuild_plan import Rebuilt, StorageContents, choose_service, rebuild
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.sqlite_errors import CatalogDamaged, startup_error
from coordinator.persistence.catalog.writer import write_rebuilt
from longleaf.durable_files import rename_file
from longleaf.errors import CatalogError, DataLoss, InvalidArgument, LongleafError, Unavailable
from longleaf.formatting import human_count
from longleaf.launch import BAD_INPUT, ERROR
from longleaf.storage.inventory import read_manifests, read_notes
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.names import SERVICES
from longleaf.storage.store import Store
from longleaf.storage.urls import FIELD
from longleaf.types import Rebuild, RebuildReport, RestoredContext

SIDES = ("", "-wal", "-shm")
"""Suffixes of the files of a database."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    try:
        report = run(msgspec.json.decode(arguments[0], type=Rebuild))
    except LongleafError as error:
        print(f"{ERROR}{_report(error)}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, Unavailable) else BAD_INPUT
    print(msgspec.json.encode(report).decode(), flush=True)
    return 0


def _report(error: LongleafError) -> str:
    """The error message, with the flag of the command line instead of the field."""
    if isinstance(error, InvalidArgument) and error.field == FIELD:
        return f"--from: {error.description}"
    return str(error)


def run(options: Rebuild) -> RebuildReport:
    """Rebuilds the catalog. Raises CatalogError if a service uses the folder or if the folder has an intact catalog
    that must not be replaced, ModelRefused, InvalidArgument unless exactly one service matches, and
    StorageUnavailable."""
    model = read_identity(Path(options.model), options.dtype)
    store = Store.open(options.url)
    folder = DataFolder.open(Path(options.data_dir), model.digest, options.model, model.facts)
    try:
        before = _existing(folder, options.may_replace)
        stored = read_stored(store, model.digest)
        made = rebuild(stored, choose_service(stored, options.service))
        moved = _install(folder, _counting_on(made, before))
    finally:
        folder.close()
    ends = sorted((context.id, context.num_tokens) for context in made.contents.contexts)
    return RebuildReport(
        folder=str(folder.path),
        service=made.contents.service_id,
        contexts=tuple(RestoredContext(*each) for each in ends),
        skipped=tuple(made.skipped),
        other_manifests=made.num_others,
        moved=tuple(map(str, moved)),
    )


def read_stored(store: Store, fingerprint: str) -> StorageContents:
    """Reads everything that belongs to a checkpoint. Raises StorageUnavailable."""
    found, damaged, others = dict[str, SegmentManifest](), dict[str, DataLoss](), list[str]()
    for name, manifest in read_manifests(store):
        if isinstance(manifest, DataLoss):
            damaged[name] = manifest
        elif manifest.fingerprint != fingerprint:
            others.append(name)
        else:
            found[name] = manifest
    entries = {entry.name: entry for entry in store.list(SERVICES)}
    # A manifest without an entry was garbage-collected in the meantime.
    known = {name: manifest for name, manifest in found.items() if name in entries}
    return StorageContents(notes=read_notes(store), manifests=known, damaged=damaged, others=others, entries=entries)


def _existing(folder: DataFolder, may_replace: bool) -> CatalogContents | None:
    """The contents of the existing catalog; None if there is no readable one. Raises CatalogError if it must not be
    replaced."""
    if not folder.database.exists():
        return None
    try:
        retained = read_only_catalog(folder.path)
    except CatalogDamaged:
        return None
    except CatalogError:
        if not may_replace:
            raise
        return None
    if retained.contexts and not may_replace:
        contexts = human_count(len(retained.contexts), "context")
        raise CatalogError(f"catalog {folder.database} has {contexts}; --replace moves it aside")
    return retained


def _counting_on(made: Rebuilt, before: CatalogContents | None) -> Rebuilt:
    """Continues the counters of the previous catalog, if it belongs to the same service."""
    if before is None or before.service_id != made.contents.service_id:
        return made
    retained = made.contents
    counted = replace(retained, next_segment=max(retained.next_segment, before.next_segment), epoch=before.epoch)
    return replace(made, contents=counted)


def _install(folder: DataFolder, made: Rebuilt) -> list[Path]:
    """Writes the new catalog completely, then moves the old one aside. Returns the new paths of old files. Raises
    CatalogError."""
    new = folder.path / "rebuilt.db"
    try:
        for side in SIDES:
            Path(f"{new}{side}").unlink(missing_ok=True)
        database = Database(new)
        try:
            database.open()
            with database.transaction(startup_error) as connection:
                write_rebuilt(connection, made.contents)
        finally:
            database.close()  # SQLite has merged the WAL into the file
        moved = _move_aside(folder)
        rename_file(new, folder.database)
    except OSError as error:
        raise startup_error(folder.database, error) from error
    return moved


def _move_aside(folder: DataFolder) -> list[Path]:
    """Renames the catalog, its companion files and the journal, whose generations continue contexts of the old catalog.
    Returns the new paths."""
    ending = f".damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    aside = folder.database.with_name(folder.database.name + ending)
    moves = [(Path(f"{folder.database}{side}"), Path(f"{aside}{side}")) for side in SIDES]
    moves.append((folder.path / JOURNAL, folder.path / f"{JOURNAL}{ending}"))
    found = [(source, target) for source, target in moves if source.is_file() or any(source.glob("*"))]
    for source, target in found:
        source.rename(target)
    return [target for _, target in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
