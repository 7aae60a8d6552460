"""Atomic replacement of files: the order of calls determines the data that a power failure may destroy."""

import os
import stat
from pathlib import Path

import pytest

from longleaf.durable_files import rename_file, replace_file

Events = list[tuple[str, int]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Syncs and renames, each with the inode of its file."""
    found: Events = []

    def fsync(file: int, fsync=os.fsync) -> None:
        found.append(("fsync", os.fstat(file).st_ino))
        fsync(file)

    def replace(old: str, new: str, replace=os.replace) -> None:
        found.append(("replace", os.stat(old).st_ino))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return found


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path: Path, events: Events) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    replace_file(path, b"new")
    inode = path.stat().st_ino
    assert events == [("fsync", inode), ("replace", inode), ("fsync", tmp_path.stat().st_ino)]
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_the_folder_is_synced_after_a_rename(tmp_path: Path, events: Events) -> None:
    source, target = tmp_path / "new", tmp_path / "file"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    inode = source.stat().st_ino
    rename_file(source, target)
    assert events == [("replace", inode), ("fsync", tmp_path.stat().st_ino)]
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o700])
def test_mode_does_not_depend_on_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o277)
    try:
        replace_file(tmp_path / "file", b"new", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no"):
        replace_file(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
