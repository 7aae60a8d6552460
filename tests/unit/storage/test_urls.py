"""Storage URLs: the storage that each selects, and refused URLs without their secrets."""

import stat
import subprocess
import sys

import pytest

from longleaf.errors import InvalidArgument, StorageUnavailable
from longleaf.storage.store import Store
from longleaf.storage.urls import redact_url


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "{}/"])
def test_folder_urls(tmp_path, form):
    folder = tmp_path / "to be" / "made"
    store = Store.open(form.format(folder))
    store.put("a/b", [b"1"])
    assert (folder / "a" / "b").read_bytes() == b"1"
    assert [entry.name for entry in store.list()] == ["a/b"]  # nothing is left of the attempt to write
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / "a")} == {0o700}
    assert stat.S_IMODE((folder / "a" / "b").stat().st_mode) == 0o600


def test_relative_folders_are_resolved_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store.open("kept")
    monkeypatch.chdir("/")
    store.put("a", [b"1"])
    assert (tmp_path / "kept" / "a").exists()


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("", "not a path"),
        ("nonsense://x", "unknown scheme nonsense://"),
        ("gs://bucket/folder", "not installed.*gcsfs"),
        ("s3://user:secret@bucket/folder?secret=1", "s3://bucket/folder has a query"),
        ("s3://bucket/folder#secret", "query"),
        ("s3:/bucket", "write s3://"),
        ("simplecache::s3://bucket", "chains"),
        ("file://host/folder", "names a host"),
        ("/etc/passwd/folder", "Not a directory"),
        ("data://x", "Read only"),
        ("/a\0b", "not a path"),
    ],
)
def test_invalid_urls_are_refused(url, reported):
    with pytest.raises(InvalidArgument, match=reported) as caught:
        Store.open(url)
    assert caught.value.field == "snapshot_url"
    assert "secret" not in str(caught.value)


def test_missing_driver_names_its_package():
    code = """
import sys
sys.modules["s3fs"] = None
from longleaf.storage.store import Store
try:
    Store.open("s3://bucket")
except Exception as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith("snapshot_url: s3://bucket needs a package")
    assert "pip install 'longleaf[s3]'" in output


def test_folders_need_no_drivers(tmp_path):
    code = f"""
import sys
from longleaf.storage.store import Store
Store.open({str(tmp_path)!r}).put("a", [b"1"])
print([name for name in ("fsspec", "numpy", "torch") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unreachable_storage_is_not_an_invalid_url():
    with pytest.raises(StorageUnavailable, match="ftp://127.0.0.1:1/x cannot be opened: Connection refused") as caught:
        Store.open("ftp://user:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/a folder?", "/a folder?"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("s3://me:a@b@bucket/x@y?z", "s3://bucket/x@y"),
        ("ftp://me@host", "ftp://host"),
    ],
)
def test_shown_urls_hide_secrets(url, expected):
    assert redact_url(url) == expected
