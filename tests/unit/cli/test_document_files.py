"""Errors for document files that are not text."""

from pathlib import Path

import pytest

from longleaf.cli.document_files import empty_files, objection
from longleaf.errors import InvalidArgument


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    """The error gives the offset of the wrong byte in the file, not in all files together."""
    contents = {"good": "Grüße".encode(), "bad": b"ab\xff", "later": b"\xff"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = objection([str(tmp_path / name) for name in contents])
    assert str(found) == f"{tmp_path / 'bad'}: is not UTF-8 at byte 2: invalid start byte"
    assert objection([str(tmp_path / "good"), "-"]) is None


def test_character_may_be_split_between_files_but_not_truncated(tmp_path: Path) -> None:
    for name, content in (("one", "ü".encode()[:1]), ("two", "ü".encode()[1:])):
        (tmp_path / name).write_bytes(content)
    assert objection([str(tmp_path / "one"), str(tmp_path / "two")]) is None
    assert str(objection([str(tmp_path / "one")])).endswith("one: is not UTF-8 at byte 0: unexpected end of data")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"%PDF-1.7 \xff", "is a PDF, but must be plain text (UTF-8): convert it, for example with pdftotext"),
        (
            b"PK\x03\x04\xff",
            "is an Office document or an archive, but must be plain text (UTF-8): convert it, for example with pandoc",
        ),
        (
            "Grüße".encode("utf-16"),
            "is UTF-16, but must be UTF-8: convert it, for example with iconv -f UTF-16 -t UTF-8",
        ),
        (b"\xef\xbb\xbfx\xff", "is not UTF-8 at byte 4: invalid start byte"),
    ],
)
def test_binary_formats_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    assert str(objection([str(tmp_path / "x")])) == f"{tmp_path / 'x'}: {message}"


def test_empty_files_among_others_are_named(tmp_path: Path) -> None:
    for name, content in (("one", b"x"), ("two", b""), ("three", b"")):
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in ("one", "two", "three")]
    assert empty_files([*files, "-", "/proc/version"]) == files[1:]


def test_file_deleted_meanwhile_is_skipped(tmp_path: Path) -> None:
    assert objection([str(tmp_path / "gone"), str(tmp_path)]) is None
    with pytest.raises(InvalidArgument):
        raise objection([_written(tmp_path / "bad", b"\xff")]) or AssertionError


def _written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)
