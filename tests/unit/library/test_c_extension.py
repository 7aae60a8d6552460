"""The cache of compiled code, and the checks before it is trusted."""

import ctypes
import logging
import os
import platform
import stat
from pathlib import Path

import pytest

from longleaf import c_extension
from longleaf.config import cache_folder

FLAGS = ("-O1",)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    return tmp_path / "home"


def answer(source):
    return c_extension.load(source, FLAGS).answer()


def kept():
    """The libraries that are kept."""
    return sorted(cache_folder().glob("*.so"))


def modes(*paths):
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def test_folders_and_libraries_are_their_users_alone(source, home):
    before = os.umask(0)
    try:
        assert answer(source) == 42
    finally:
        os.umask(before)
    assert modes(home, home / "cache", cache_folder(), *kept()) == [0o700] * 4
    assert [path.name for path in cache_folder().iterdir()] == [path.name for path in kept()]


def open_to_all(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def open_to_the_group(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o770)


def anothers(folder):
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)


def link_to_an_open_one(folder):
    folder.parent.mkdir(parents=True)
    open_to_all(folder.parent / "there")
    folder.symlink_to("there")


def in_an_open_one(folder):
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o777)


def a_file(folder):
    folder.parent.mkdir(parents=True)
    folder.touch()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (open_to_all, "other users can write"),
        (open_to_the_group, "other users can write"),
        (anothers, "belongs to user 12345"),
        (link_to_an_open_one, "there: other users can write"),
        (in_an_open_one, "cache: other users can write"),
        (a_file, "longleaf"),
    ],
)
def test_a_folder_that_others_can_change_is_not_used_and_one_is_told(source, prepare, reason, caplog, monkeypatch):
    planted = source.with_name("planted")
    monkeypatch.setenv("XDG_CACHE_HOME", str(planted))
    answer(source)
    [library] = kept()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.with_name("home") / "cache"))
    prepare(cache_folder())
    if cache_folder().is_dir():  # another user's file has the right name
        (cache_folder() / library.name).write_bytes(b"not a library")
    before = sorted(cache_folder().glob("*"))
    with caplog.at_level(logging.WARNING, "longleaf"):
        assert answer(source) == 42
    [reported] = caplog.messages
    assert reason in reported and "compiled again at every start" in reported
    assert sorted(cache_folder().glob("*")) == before


def test_a_link_to_a_folder_of_ones_own_is_followed(source, caplog):
    cache_folder().parent.mkdir(parents=True)
    (cache_folder().parent / "there").mkdir(mode=0o700)
    cache_folder().symlink_to("there")
    assert answer(source) == 42
    assert kept() and not caplog.messages


def zeros(data):
    return bytes(len(data))


def half(data):
    return data[: len(data) // 2]


def nothing(data):
    return b""


def changed(data):
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.parametrize("damage", [zeros, half, nothing, changed])
def test_a_library_that_a_crash_damaged_is_made_again(source, damage):
    """It must not even be opened: the half of a library ends the process that touches the rest."""
    cache_folder().mkdir(parents=True, mode=0o700)
    flags = ("-c", "-fPIC", *FLAGS)
    path = c_extension.build(source, flags, cache_folder())
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(whole))
    path.chmod(0o700)
    assert c_extension.build(source, flags, cache_folder()) == path
    assert len(path.read_bytes()) == len(whole)
    assert ctypes.CDLL(str(path)).answer() == 42


def test_a_library_that_others_may_write_is_made_again(source):
    answer(source)
    [path] = kept()
    made = path.stat().st_ino
    answer(source)
    assert path.stat().st_ino == made
    path.chmod(0o777)
    answer(source)
    assert modes(path) == [0o700]


def test_another_compiler_and_another_libc_make_another_library(source, tmp_path, monkeypatch):
    answer(source)
    tools = tmp_path / "tools"
    tools.mkdir()
    compiler = tools / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "cc 99.1" || exec /usr/bin/cc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    answer(source)
    assert len(kept()) == 2
    monkeypatch.setattr(c_extension.platform, "libc_ver", lambda: ("glibc", "99"))
    answer(source)
    assert len(kept()) == 3
    answer(source)
    assert len(kept()) == 3


def test_a_library_is_on_the_disk_before_it_has_its_name(source, monkeypatch):
    events = []

    def named(file):
        return Path(os.readlink(f"/proc/self/fd/{file}"))

    def fsync(file, fsync=os.fsync):
        events.append(("fsync", named(file).stat().st_ino))
        fsync(file)

    def replace(old, new, replace=os.replace):
        events.append(("replace", os.stat(old).st_ino))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    answer(source)
    [path] = kept()
    library, folder = path.stat().st_ino, cache_folder().stat().st_ino
    assert events == [("fsync", library), ("replace", library), ("fsync", folder)]


def test_without_a_compiler_the_reason_is_told(source, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="cc"):
        answer(source)


def test_a_compiler_that_fails_says_why(source):
    source.write_text("int answer(void) { return nothing; }")
    with pytest.raises(OSError, match="nothing"):
        answer(source)
    assert not kept()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installation that has no libraries yet."""
    monkeypatch.setattr(c_extension, "INSTALLED", tmp_path / "installed")
    return tmp_path / "installed"


def without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def test_what_was_installed_is_loaded_where_there_is_no_compiler(source, installed, monkeypatch):
    c_extension.install(source, FLAGS)
    assert len(list(installed.iterdir())) == len(c_extension.KINDS[platform.machine()])
    without_a_compiler(monkeypatch)
    assert answer(source) == 42
    assert not kept()


def test_other_code_than_was_installed_is_compiled(source, installed):
    c_extension.install(source, FLAGS)
    source.write_text("int answer(void) { return 43; }")
    assert answer(source) == 43
    assert len(kept()) == 1


def test_code_for_a_processor_is_loaded_on_one_that_has_all_it_takes(source, installed, monkeypatch):
    kinds = c_extension.KINDS[platform.machine()]
    c_extension.install(source, ("-O1", c_extension.NATIVE))
    for kind, features in kinds.items():
        monkeypatch.setattr(c_extension, "_processor_features", lambda features=features: sorted(features))
        assert c_extension.find_installed(source, ("-O1", c_extension.NATIVE)).name.startswith(f"answer-{kind}-")
    monkeypatch.setattr(c_extension, "_processor_features", lambda: sorted(next(iter(kinds.values())))[1:])
    assert not c_extension.find_installed(source, ("-O1", c_extension.NATIVE)).name.startswith(
        f"answer-{next(iter(kinds))}-"
    )


def test_nothing_that_was_installed_fits_a_machine_of_another_kind(source, installed, monkeypatch):
    c_extension.install(source, FLAGS)
    monkeypatch.setattr(c_extension.platform, "machine", lambda: "riscv64")
    assert c_extension.find_installed(source, FLAGS) is None
