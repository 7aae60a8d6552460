"""The data folder: permissions, locking, and the files in it."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.data_folder import DataFolder
from coordinator.persistence.catalog.other_models import describe_unusable
from longleaf.errors import CatalogError
from tests.support.catalog import document

DIGEST = "0123456789abcdef" * 4


@pytest.fixture(params=[0o000, 0o022, 0o077 if os.geteuid() else 0o777])  # only root can use files of mode 0
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
async def test_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path / "data", DIGEST, "model", {})
    folder.record_address("127.0.0.1:1234")
    catalog = await Catalog.open(folder.database)
    await catalog.commit(document("a", 0))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    await catalog.close()
    folder.close()
    names = {"catalog.db", "catalog.db-wal", "catalog.db-shm", "holder.json", "lock", "model.json"}
    assert modes == dict.fromkeys(names, 0o600)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.path.parent)] == [0o700, 0o700]


async def test_contexts_of_other_models_are_named(tmp_path: Path) -> None:
    for digest, model, names in (("e" * 64, "./old", "abcdefg"), ("f" * 64, "./older", "x"), ("d" * 64, "./empty", "")):
        other = DataFolder.open(tmp_path, digest, model, {})
        catalog = await Catalog.open(other.database)
        for index, name in enumerate(names):
            await catalog.commit(document(name, index))
        await catalog.close()
        other.close()
    (tmp_path / ("b" * 32)).mkdir()
    (tmp_path / ("b" * 32) / "model.json").write_text("{")
    folder = DataFolder.open(tmp_path, DIGEST, "./new", {})
    catalog = await Catalog.open(folder.database)
    await catalog.commit(document("own", 0))
    changed = {"m": "config.json changed", "n": "config.json changed"}
    assert describe_unusable(folder, "./new", changed) == (
        f"{tmp_path} also has 7 contexts (a, b, c, d, e and 2 more) of another model: serve ./old to use them",
        f"{tmp_path} also has 1 context (x) of another model: serve ./older to use it",
        f"{tmp_path} also has 2 contexts (m, n) of this model in an earlier state: config.json changed",
    )
    await catalog.close()
    folder.close()


def test_locked_folder_names_its_service(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, DIGEST, "model", {})
    for address in ("", "10.0.0.1:50051"):
        folder.record_address(address)
        with pytest.raises(CatalogError, match=f"is in use by process {os.getpid()} on .*{address}: stop that service"):
            DataFolder.open(tmp_path, DIGEST, "model", {})
    other = DataFolder.open(tmp_path, "f" * 64, "model", {})
    folder.close()
    folder.close()
    DataFolder.open(tmp_path, DIGEST, "model", {}).close()
    other.close()


def test_lock_without_holder_information_is_still_a_lock(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, DIGEST, "model", {})
    (folder.path / "holder.json").write_bytes(b"")
    with pytest.raises(CatalogError, match="is in use by another process"):
        DataFolder.open(tmp_path, DIGEST, "model", {})
    folder.close()


HOLDER = """
import sys, time
from pathlib import Path
from coordinator.persistence.catalog.data_folder import DataFolder
folder = DataFolder.open(Path(sys.argv[1]), sys.argv[2], "model", {})
print("held", flush=True)
time.sleep(600)
"""


def test_lock_is_released_when_its_holder_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), DIGEST], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(CatalogError, match=f"is in use by process {child.pid} on "):
            DataFolder.open(tmp_path, DIGEST, "model", {})
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    DataFolder.open(tmp_path, DIGEST, "model", {}).close()


def test_other_models_are_listed_with_their_details(tmp_path: Path) -> None:
    first = DataFolder.open(tmp_path, DIGEST, "old", {"config.json": "ab", "dtype": "float32"})
    first.close()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    second = DataFolder.open(tmp_path, "f" * 64, "new", {})
    ((path, reported),) = second.other_models()
    second.close()
    assert path == first.path == tmp_path / DIGEST[:32]
    assert (reported.model, reported.fingerprint, reported.facts) == (
        "old",
        DIGEST,
        {"config.json": "ab", "dtype": "float32"},
    )


def test_path_that_is_not_a_folder_of_this_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(CatalogError, match="file is a file: give a folder"):
        DataFolder.open(tmp_path / "file", DIGEST, "model", {})
    with pytest.raises(CatalogError, match="file cannot be used: .*read and write"):
        DataFolder.open(tmp_path / "file" / "data", DIGEST, "model", {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "data", tmp_path / "data" / DIGEST[:32]):
        place.mkdir()
        os.chown(place, 12345, 12345)
        with pytest.raises(CatalogError, match=f"{place} belongs to user 12345.*chown 0 {place}"):
            DataFolder.open(tmp_path / "data", DIGEST, "model", {})
        os.chown(place, 0, 0)
