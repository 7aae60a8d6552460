"""The cache of compiled code, and the checks before it is trusted."""

import ctypes
import logging
import os
import platform
import stat

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
    """An empty home directory for the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    return tmp_path / "home"


def answer(source):
    return c_extension.load(source, FLAGS).answer()


def cached_libraries():
    """The libraries in the cache."""
    return sorted(cache_folder().glob("*.so"))


def modes(*paths):
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def test_folders_and_libraries_are_private_to_the_user(source, home):
    before = os.umask(0)
    try:
        assert answer(source) == 42
    finally:
        os.umask(before)
    assert modes(home, home / "cache", cache_folder(), *cached_libraries()) == [0o700] * 4
    assert [path.name for path in cache_folder().iterdir()] == [path.name for path in cached_libraries()]


def open_to_all(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def open_to_the_group(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o770)


def owned_by_another_user(folder):
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
        (owned_by_another_user, "belongs to user 12345"),
        (link_to_an_open_one, "there: other users can write"),
        (in_an_open_one, "cache: other users can write"),
        (a_file, "longleaf"),
    ],
)
def test_folder_writable_by_others_is_not_used(source, prepare, reason, caplog, monkeypatch):
    planted = source.with_name("planted")
    monkeypatch.setenv("XDG_CACHE_HOME", str(planted))
    answer(source)
    [library] = cached_libraries()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.with_name("home") / "cache"))
    prepare(cache_folder())
    if cache_folder().is_dir():  # another user's file has the right name
        (cache_folder() / library.name).write_bytes(b"not a library")
    before = sorted(cache_folder().glob("*"))
    with caplog.at_level(logging.WARNING, "longleaf"):
        assert answer(source) == 42
    [line] = caplog.messages
    assert reason in line and "compiled again at every start" in line
    assert sorted(cache_folder().glob("*")) == before


def test_link_to_an_own_folder_is_followed(source, caplog):
    cache_folder().parent.mkdir(parents=True)
    (cache_folder().parent / "there").mkdir(mode=0o700)
    cache_folder().symlink_to("there")
    assert answer(source) == 42
    assert cached_libraries() and not caplog.messages


def zeros(data):
    return bytes(len(data))


def half(data):
    return data[: len(data) // 2]


def nothing(data):
    return b""


def changed(data):
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.parametrize("damage", [zeros, half, nothing, changed])
def test_library_damaged_by_a_crash_is_rebuilt(source, damage):
    """It must not be opened: access to the missing half of a library ends the process."""
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


def test_library_writable_by_others_is_rebuilt(source):
    answer(source)
    [path] = cached_libraries()
    made = path.stat().st_ino
    answer(source)
    assert path.stat().st_ino == made
    path.chmod(0o777)
    answer(source)
    assert modes(path) == [0o700]


def test_compiler_and_libc_are_part_of_the_cache_key(source, tmp_path, monkeypatch):
    answer(source)
    tools = tmp_path / "tools"
    tools.mkdir()
    compiler = tools / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "cc 99.1" || exec /usr/bin/cc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    answer(source)
    assert len(cached_libraries()) == 2
    monkeypatch.setattr(c_extension.platform, "libc_ver", lambda: ("glibc", "99"))
    answer(source)
    assert len(cached_libraries()) == 3
    answer(source)
    assert len(cached_libraries()) == 3


def test_missing_compiler_is_reported(source, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="cc"):
        answer(source)


def test_compiler_error_is_reported(source):
    source.write_text("int answer(void) { return nothing; }")
    with pytest.raises(OSError, match="nothing"):
        answer(source)
    assert not cached_libraries()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installation that has no libraries yet."""
    monkeypatch.setattr(c_extension, "INSTALLED", tmp_path / "installed")
    return tmp_path / "installed"


def without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def test_installed_library_is_loaded_without_a_compiler(source, installed, monkeypatch):
    c_extension.install(source, FLAGS)
    assert len(list(installed.iterdir())) == len(c_extension.KINDS[platform.machine()])
    without_a_compiler(monkeypatch)
    assert answer(source) == 42
    assert not cached_libraries()


def test_changed_source_is_compiled(source, installed):
    c_extension.install(source, FLAGS)
    source.write_text("int answer(void) { return 43; }")
    assert answer(source) == 43
    assert len(cached_libraries()) == 1


@pytest.fixture
def headers(source):
    """Two headers, of which the source includes one, and that one the other."""
    outer, inner = source.with_name("outer.h"), source.with_name("inner.h")
    source.write_text('#include <string.h>\n#include "outer.h"\nint answer(void) { return ANSWER; }')
    outer.write_text('#include "inner.h"\n#define ANSWER INNER')
    inner.write_text("#define INNER 42")
    return outer, inner


def test_changed_header_is_compiled(source, headers, installed):
    c_extension.install(source, FLAGS)
    assert answer(source) == 42 and not cached_libraries()
    outer, inner = headers
    inner.write_text("#define INNER 43")
    assert answer(source) == 43 and len(cached_libraries()) == 1
    outer.write_text("#define ANSWER 44")
    assert answer(source) == 44 and len(cached_libraries()) == 2
    outer.write_text('#include "inner.h"\n#define ANSWER INNER')
    assert answer(source) == 43 and len(cached_libraries()) == 2


def test_headers_that_include_each_other_are_compiled(source, headers):
    _, inner = headers
    inner.write_text('#pragma once\n#include "outer.h"\n#define INNER 42')
    headers[0].write_text('#pragma once\n#include "inner.h"\n#define ANSWER INNER')
    assert answer(source) == 42


def test_missing_header_is_reported(source, headers):
    headers[1].unlink()
    with pytest.raises(OSError, match=r"inner\.h"):
        answer(source)


def test_library_is_loaded_only_if_the_processor_has_its_features(source, installed, monkeypatch):
    kinds = c_extension.KINDS[platform.machine()]
    c_extension.install(source, ("-O1", c_extension.NATIVE))
    for kind, features in kinds.items():
        monkeypatch.setattr(c_extension, "_processor_features", lambda features=features: sorted(features))
        assert c_extension.find_installed(source, ("-O1", c_extension.NATIVE)).name.startswith(f"answer-{kind}-")
    monkeypatch.setattr(c_extension, "_processor_features", lambda: sorted(next(iter(kinds.values())))[1:])
    assert not c_extension.find_installed(source, ("-O1", c_extension.NATIVE)).name.startswith(
        f"answer-{next(iter(kinds))}-"
    )


def test_installed_library_of_another_architecture_is_not_loaded(source, installed, monkeypatch):
    c_extension.install(source, FLAGS)
    monkeypatch.setattr(c_extension.platform, "machine", lambda: "riscv64")
    assert c_extension.find_installed(source, FLAGS) is None
