"""Recognition of kinds, charsets, and sources by page."""

from pathlib import Path

import pytest

from longleaf.client.documents import pieces_of, size_of
from longleaf.client.files import files_of
from longleaf.document_text import NamedPart, TextFile, is_place, place_name
from longleaf.documents.collection import Collector
from longleaf.documents.errors import NotText, Unreadable
from longleaf.documents.kinds import Kind, kind_of
from longleaf.documents.text_files import check_encoding, decode, find_invalid_utf8, without_controls
from longleaf.errors import InvalidArgument
from longleaf.formatting import printable
from tests.support import document_samples as samples


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("x", samples.pdf(["a"]), "pdf"),
        ("x.pdf", b"\n\n" + samples.pdf(["a"]), "pdf"),
        ("x.docx", samples.docx(), "docx"),
        ("x", samples.docx(), "docx"),
        ("x", samples.epub(), "epub"),
        ("x.pptx", samples.pptx(), "pptx"),
        ("x", samples.zipped({"a": "b"}), "zip"),
        ("x.tgz", samples.tarred({"a": "b"}, "w:gz"), "tar"),
        ("x.bin", samples.tarred({"a": "b"}), "tar"),
        ("x.HTM", b"hello", "html"),
        ("x", b"\xef\xbb\xbf <!DOCTYPE HTML>", "html"),
        ("x.ipynb", samples.notebook(), "notebook"),
        ("x.py", b"print(1)", "text"),
        ("x.txt", "Grüße".encode("utf-16"), "text"),
        ("BMI.txt", b"BMI is weight over height", "text"),
        ("MZ", b"MZ is the code of Mozambique", "text"),
        ("x", b"", "text"),
    ],
    ids=lambda value: "bytes" if isinstance(value, bytes) else value,  # files contain the time at which they were made
)
def test_kind_follows_from_content_and_name(name: str, content: bytes, kind: Kind) -> None:
    assert kind_of(name, content) == kind


def test_markup_may_be_read_as_text() -> None:
    assert kind_of("x.html", b"<html>", as_text=True) == kind_of("x.ipynb", b"{}", as_text=True) == "text"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x89PNG", "is a PNG image"),
        (b"BM\0\0", "is a BMP image"),
        (samples.zipped({"mimetype": "application/vnd.oasis.opendocument.text"}, 0), "is an OpenDocument file: "),
        (b"a\0b", "is not text: byte 1 is zero"),
    ],
    ids=lambda value: "bytes" if isinstance(value, bytes) else value,
)
def test_other_formats_are_named(content: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        kind_of("x", content)


def test_invalid_byte_has_its_offset_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("ü".encode() * 200_000 + b"\xff")
    assert find_invalid_utf8(tmp_path / "x") == "is not UTF-8 at byte 400000: invalid start byte"
    (tmp_path / "x").write_bytes(b"ab" + "ü".encode()[:1])
    assert find_invalid_utf8(tmp_path / "x") == "is not UTF-8 at byte 2: unexpected end of data"
    with pytest.raises(NotText, match="is not UTF-8 at byte 4: invalid start byte"):
        decode(b"\xef\xbb\xbfx\xff")
    with pytest.raises(NotText, match="is not ascii at byte 1"):
        decode(b"a\xff", "ascii")


def test_charsets_are_checked() -> None:
    assert check_encoding("Latin1", "--encoding") == "iso8859-1"
    assert check_encoding("UTF-16", "--encoding") == "utf-16"
    for name in ("hex", "rot13", "punycode", "unicode_escape", "klingon", "", "\0"):
        with pytest.raises(InvalidArgument, match="is not a known charset"):
            check_encoding(name, "--encoding")


def test_controls_reach_no_terminal() -> None:
    assert printable("a\x1b[31m\n\u202eb\udcff") == "a\ufffd[31m\ufffd\ufffdb?"
    assert without_controls("a\r\nb\rc\x00\x1b\td\x85\ud800") == "a\nb\nc\td\ufffd"


def test_pages_become_sources(tmp_path: Path) -> None:
    """Offsets of pages in the text of the document have the names of the pages."""
    (tmp_path / "a.pdf").write_bytes(samples.pdf(["Grüße", "", "two"]))
    (tmp_path / "b.txt").write_text("three")
    parts = Collector().collect([str(tmp_path / "a.pdf"), str(tmp_path / "b.txt")]).parts(headers=False)
    a, b = f"{tmp_path}/a.pdf", f"{tmp_path}/b.txt"
    assert files_of(parts) == (TextFile(f"{a}, page 1", 0), TextFile(f"{a}, page 3", 9), TextFile(b, 14))
    assert size_of(parts) == 19
    with_headers = Collector().collect([str(tmp_path / "a.pdf"), str(tmp_path / "b.txt")]).parts()
    assert [each.name for each in files_of(with_headers)] == [a, f"{a}, page 1", f"{a}, page 3", b, b]


async def test_named_parts_are_sent_as_their_content(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("ß".encode())
    parts = [NamedPart("a", "ü"), NamedPart("b", tmp_path / "x")]
    assert b"".join([bytes(piece) async for piece in pieces_of(parts)]).decode() == "üß"  # type: ignore[arg-type]
    assert files_of(NamedPart("b", tmp_path / "x")) == (TextFile("b", 0),)


def test_names_of_places() -> None:
    assert place_name("a.pdf", "page 7") == "a.pdf, page 7"
    assert place_name("a.txt", "") == "a.txt"
    assert is_place("a.pdf, page 7")
    assert not is_place("a, page x.txt")
