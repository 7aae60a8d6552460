"""Files that attack their reader: each gives one sentence, or its text, within the limits of time and memory."""

import gzip
import io
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from longleaf.documents.extraction_process import ExtractedFile, extract
from longleaf.documents.limits import ExtractionLimits
from longleaf.errors import InvalidArgument
from tests.support import document_samples as samples

LIMITS = ExtractionLimits(
    file_bytes=32 << 20,
    text_bytes=1 << 20,
    expanded_bytes=16 << 20,
    member_bytes=8 << 20,
    num_members=200,
    num_pages=100,
    memory_bytes=256 << 20,
    cpu_seconds=5,
    seconds=20.0,
)
MIB = 1 << 20
ENTITIES = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'
XXE = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>'
HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {}
"""Name of the case: name of the file, its content, and a part of the reason. An empty reason: it has text."""


def hostile(file: str, reason: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def register(make: Callable[[], bytes]) -> Callable[[], bytes]:
        HOSTILE[make.__name__] = (file, make, reason)
        return make

    return register


def replaced_part(package: bytes, part: str, change: Callable[[str], str]) -> bytes:
    """An Office file with a changed part."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files[part] = change(files[part].decode()).encode()
    return samples.zipped(files)


def quine_like(data: bytes, levels: int) -> bytes:
    for i in range(levels):
        data = samples.zipped({f"{i}.zip": data})
    return data


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


# Archives


@hostile("bomb.zip", "has no members that can be read")
def zip_member_larger_than_the_limit() -> bytes:
    return samples.zipped({"zeros.txt": b"0" * (9 * MIB)})


@hostile("bomb.zip", "has more than 16,777,216 decompressed bytes")
def zip_of_many_large_members() -> bytes:
    return samples.zipped({f"{i}.bin": b"\0" * (7 * MIB) for i in range(3)})


@hostile("bomb.zip", "has more than 1,048,576 bytes of text")
def zip_with_more_text_than_allowed() -> bytes:
    return samples.zipped({"a.txt": b"a" * (2 * MIB)})


@hostile("many.zip", "has more than 200 members")
def zip_of_many_members() -> bytes:
    return samples.zipped({f"{i}.txt": "x" for i in range(300)}, zipfile.ZIP_STORED)


@hostile("nested.zip", "has no members that can be read")
def zip_nested_too_deeply() -> bytes:
    return quine_like(samples.zipped({"a.txt": "x"}), 20)


@hostile("nested.zip", "decompressed bytes")
def zip_that_multiplies_on_each_level() -> bytes:
    inner = samples.zipped({"zeros": b"\0" * (5 * MIB)})
    return samples.zipped({f"{i}.zip": samples.zipped({f"{j}.zip": inner for j in range(9)}) for i in range(9)})


@hostile("overlap.zip", "")
def zip_with_overlapping_members() -> bytes:
    """All entries of the directory point to the same data, as in Fifield's bomb."""
    one = samples.zipped({"a.txt": b"a" * 1000})
    start, end = one.index(b"PK\1\2"), one.index(b"PK\5\6")
    entries = one[start:end] * 50
    return one[:start] + entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 50, 50, len(entries), start, 0)


@hostile("lie.zip", "has no members that can be read")
def zip_that_declares_a_smaller_size() -> bytes:
    data = bytearray(samples.zipped({"a.txt": b"a" * 100_000}))
    place = data.index(b"PK\1\2")
    struct.pack_into("<L", data, place + 24, 10)
    struct.pack_into("<L", data, data.index(b"PK\3\4") + 22, 10)
    return bytes(data)


@hostile("cut.zip", "is a damaged zip archive")
def zip_cut_in_the_middle() -> bytes:
    data = samples.zipped({"a.txt": b"text" * 1000})
    return data[: len(data) // 2]


@hostile("traversal.zip", "has no members that can be read")
def zip_with_names_that_lead_out() -> bytes:
    return samples.zipped({"../../etc/cron.d/x": "x", "/etc/passwd": "x", "..\\..\\x": "x", "C:\\x": "x"})


@hostile("links.zip", "has no members that can be read")
def zip_with_links() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("link")
        info.create_system, info.external_attr = 3, 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return out.getvalue()


@hostile("secret.zip", "has no members that can be read")
def zip_with_a_password() -> bytes:
    data = bytearray(samples.zipped({"a.txt": "x"}))
    data[data.index(b"PK\1\2") + 8] |= 1
    return bytes(data)


@hostile("names.zip", "")
def zip_with_control_characters_in_names() -> bytes:
    return samples.zipped({"\x1b[31mred\x07\n.txt": "x"})


@hostile("method.zip", "has no members that can be read")
def zip_with_an_unknown_compression() -> bytes:
    data = bytearray(samples.zipped({"a.txt": "x"}))
    struct.pack_into("<H", data, data.index(b"PK\1\2") + 10, 99)
    struct.pack_into("<H", data, data.index(b"PK\3\4") + 8, 99)
    return bytes(data)


@hostile("empty.zip", "has no members that can be read")
def zip_without_members() -> bytes:
    return samples.zipped({})


@hostile("x.tar", "has no members that can be read")
def tar_with_links_and_devices() -> bytes:
    others = []
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
        info = tarfile.TarInfo(f"x{kind!r}")
        info.type, info.linkname, info.devmajor = kind, "/etc/passwd", 1
        others.append(info)
    return samples.tarred({"../out.txt": "x", "/abs.txt": "x"}, others=others)


@hostile("bomb.tar.gz", "has more than 16,777,216 decompressed bytes")
def tar_bomb() -> bytes:
    return samples.tarred({f"{i}": b"\0" * (7 * MIB) for i in range(3)}, "w:gz")


@hostile("bomb.tar.xz", "has more than 16,777,216 decompressed bytes")
def tar_bomb_of_xz() -> bytes:
    return samples.tarred({"a": b"\0" * (40 * MIB)}, "w:xz")


@hostile("bomb.gz", "is not a tar archive")
def gzip_bomb_without_tar() -> bytes:
    return gzip.compress(b"a" * (64 * MIB))


@hostile("sparse.tar", "has more than 16,777,216 decompressed bytes")
def tar_that_declares_a_terabyte() -> bytes:
    info = tarfile.TarInfo("huge.txt")
    info.size = 1 << 40
    return info.tobuf() + b"\0" * 1024


@hostile("pax.tar", "damaged")
def tar_with_a_huge_extended_header() -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 1 << 35
    return info.tobuf() + b"\0" * 4096


@hostile("headers.tar", "is not a tar archive, or a damaged one: maximum recursion depth")
def tar_of_extended_headers() -> bytes:
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    return header.tobuf() * 20_000


@hostile("charset.html", "")
def html_in_a_codec_that_is_no_charset() -> bytes:
    """The confined process cannot import it."""
    return b"<html><meta charset='undefined'><p>text"


@hostile("cut.tar.bz2", "is not a tar archive, or a damaged one")
def tar_cut_in_the_middle() -> bytes:
    return samples.tarred({"a.txt": bytes(range(256)) * 100}, "w:bz2")[:60]


# PDF


@hostile("pages.pdf", "")
def pdf_that_declares_a_billion_pages() -> bytes:
    return patched(samples.pdf(["x"]), b"/Count 1 ", b"/Count 1000000000 ")


@hostile("pages.pdf", "has 150 pages; the limit is 100")
def pdf_of_many_pages() -> bytes:
    return samples.pdf(["x"] * 150)


@hostile("loop.pdf", "damaged PDF")
def pdf_pages_that_contain_each_other() -> bytes:
    return samples.pdf_of_objects(
        [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 /Parent 2 0 R >>"]
    )


@hostile("deep.pdf", "")
def pdf_with_deep_arrays() -> bytes:
    return samples.pdf(["text"], catalog="/X " + "[" * 100_000 + "]" * 100_000)


@hostile("form.pdf", "has 1 page and no text")
def pdf_with_a_form_that_draws_itself() -> bytes:
    form = b"<< /Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /F 5 0 R >> >> /Length 5 >>"
    return samples.pdf_of_objects(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /XObject << /F 5 0 R >> >> >>",
            b"<< /Length 5 >>\nstream\n/F Do\nendstream",
            form + b"\nstream\n/F Do\nendstream",
        ]
    )


@hostile("bomb.pdf", "no text|memory|damaged|processor time")
def pdf_page_that_decompresses_without_end() -> bytes:
    bomb = zlib.compress(zlib.compress(b"q " * (150 * MIB), 9), 9)
    return samples.pdf_of_objects(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
            f"<< /Length {len(bomb)} /Filter [/FlateDecode /FlateDecode] >>\nstream\n".encode() + bomb + b"\nendstream",
        ]
    )


@hostile("offsets.pdf", "")
def pdf_with_wrong_offsets() -> bytes:
    data = samples.pdf(["text"])
    start = data.rindex(b"xref\n0")
    return data[:start] + data[start:].replace(b"00000000", b"99999999")


@hostile("cut.pdf", "damaged PDF")
def pdf_cut_in_the_middle() -> bytes:
    return samples.pdf(["text"])[:60]


@hostile("encrypted.pdf", "is encrypted: save it without a password")
def pdf_with_a_password() -> bytes:
    encrypt = "/Encrypt << /Filter /Standard /V 2 /R 3 /Length 128 /P -4 /O <{0}> /U <{0}> >> /ID [<00> <00>]"
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [] /Count 0 >>"]
    return samples.pdf_of_objects(objects, encrypt.format("41" * 32))


@hostile("actions.pdf", "")
def pdf_with_actions_and_attachments() -> bytes:
    action = "/OpenAction << /S /Launch /F (/bin/sh) >> /AA << /WC << /S /JavaScript /JS (app.alert\\(1\\)) >> >>"
    return samples.pdf(["text"], catalog=action)


@hostile("garbage.pdf", "damaged PDF")
def pdf_of_noise() -> bytes:
    return b"%PDF-1.7\n" + bytes((i * i * 31 + i // 7) % 256 for i in range(100_000))


# Office files


@hostile("x.docx", "has a document type definition")
def docx_with_an_external_entity() -> bytes:
    return replaced_part(
        samples.docx(["Hello"]), "word/document.xml", lambda xml: XXE + xml.partition("?>")[2].replace("Hello", "&e;")
    )


@hostile("x.docx", "has a document type definition")
def docx_with_a_billion_laughs() -> bytes:
    return replaced_part(
        samples.docx(["Hello"]),
        "word/document.xml",
        lambda xml: ENTITIES + xml.partition("?>")[2].replace("Hello", "&c;"),
    )


@hostile("x.docx", "has 4")
def docx_with_a_huge_part() -> bytes:
    return replaced_part(samples.docx(), "word/styles.xml", lambda xml: xml + " " * (40 * MIB))


@hostile("x.docx", "is damaged|not a Word")
def docx_with_deep_xml() -> bytes:
    deep = "<w:r>" * 50_000 + "</w:r>" * 50_000
    return replaced_part(
        samples.docx(["Hello"]), "word/document.xml", lambda xml: xml.replace("<w:t>Hello</w:t>", deep)
    )


@hostile("x.docx", "is not a Word document|is damaged")
def docx_that_is_another_zip() -> bytes:
    return samples.zipped({"hello.txt": "x"})


@hostile("x.docx", "is a damaged file")
def docx_cut_in_the_middle() -> bytes:
    return samples.docx()[:5000]


@hostile("x.docx", "is not a Word|is damaged")
def docx_that_is_a_presentation() -> bytes:
    return samples.pptx()


@hostile("x.docx", "")
def docx_with_external_relationships() -> bytes:
    target = '<Relationship Id="rX" Type="http://x/image" Target="http://169.254.169.254/" TargetMode="External"/>'
    return replaced_part(
        samples.docx(["Hello"]),
        "word/_rels/document.xml.rels",
        lambda xml: xml.replace("</Relationships>", target + "</Relationships>"),
    )


@hostile("x.doc", "is an Office file of the old format, or has a password")
def old_office_file() -> bytes:
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 4096


@hostile("x.pptx", "has a document type definition")
def pptx_with_an_external_entity() -> bytes:
    return replaced_part(
        samples.pptx(), "ppt/slides/slide1.xml", lambda xml: XXE + xml.partition("?>")[2].replace("Body", "&e;")
    )


# HTML, books, notebooks, text


@hostile("deep.html", "")
def html_nested_deeply() -> bytes:
    return b"<p>text</p>" + b"<div>" * 200_000


@hostile("line.html", "")
def html_of_one_long_line() -> bytes:
    """The time of the reader grows with its length."""
    return b"<p>" + b"<b>- </b>" * 50_000 + b"<b>word</b> " * 50_000


@hostile("row.html", "")
def html_of_one_long_row() -> bytes:
    return b"<p>text</p><table><tr>" + b"<td> </td>" * 100_000


@hostile("attributes.html", "")
def html_with_a_huge_attribute() -> bytes:
    return b'<p title="' + b"x" * (5 * MIB) + b'">text</p>'


@hostile("attributes.html", "")
def html_with_many_attributes() -> bytes:
    return b"<p " + b" ".join(b"a%d=1" % i for i in range(20_000)) + b">text</p>"


@hostile("entities.html", "")
def html_with_entities() -> bytes:
    return (ENTITIES + "<p>text &c;&e;</p>").encode()


@hostile("local.html", "")
def html_that_refers_to_local_files() -> bytes:
    return b'<p>text</p><iframe src="file:///etc/passwd"></iframe><link rel=stylesheet href="http://169.254.169.254/">'


@hostile("book.epub", "has no text|is a damaged EPUB")
def epub_with_an_external_entity() -> bytes:
    return samples.zipped(
        {"META-INF/container.xml": XXE + samples.CONTAINER, "OEBPS/book.opf": XXE + "<package>&e;</package>"}
    )


@hostile("book.epub", "is a damaged EPUB book")
def epub_without_contents() -> bytes:
    return samples.zipped({"mimetype": "application/epub+zip"})


@hostile("deep.ipynb", "is not a notebook")
def notebook_nested_deeply() -> bytes:
    return b'{"cells":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"


@hostile("number.ipynb", "")
def notebook_with_unexpected_types() -> bytes:
    return b'{"nbformat": 4, "cells": [5, null, {"source": 7}, {"source": "text", "outputs": "x", "cell_type": {}}]}'


@hostile("image.txt", "is a PNG image")
def image_named_as_text() -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@hostile("program.pdf", "is a program")
def program_named_as_pdf() -> bytes:
    return b"\x7fELF\2\1\1" + b"\0" * 4096


@hostile("text.docx", "is named .docx, but is not a Word document")
def text_named_as_docx() -> bytes:
    return b"just text"


@hostile("polyglot.pdf", "")
def pdf_that_is_also_a_zip() -> bytes:
    return samples.pdf(["text"]) + samples.zipped({"other.txt": "not text"})


@hostile("polyglot.zip", "")
def pdf_named_as_zip() -> bytes:
    return samples.pdf(["text"])


@hostile("zero.pdf", "is empty")
def empty_pdf() -> bytes:
    return b""


@hostile("bytes.txt", "is not UTF-8 at byte 4: invalid start byte")
def text_that_is_not_utf8() -> bytes:
    return b"text\xff"


@hostile("escape.txt", "")
def text_with_terminal_controls() -> bytes:
    return b"text \x1b]0;title\x07"


def attempt(path: Path, name: str) -> ExtractedFile | str:
    with path.open("rb") as file:
        try:
            return extract(file, name, limits=LIMITS)
        except InvalidArgument as error:
            return str(error)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_gives_one_sentence_within_the_limits(case: str, tmp_path: Path) -> None:
    name, make, reason = HOSTILE[case]
    (tmp_path / "file").write_bytes(make())
    began = time.monotonic()
    found = attempt(tmp_path / "file", name)
    assert time.monotonic() - began < LIMITS.seconds + 10
    if isinstance(found, str):
        assert reason, found
        assert any(part in found for part in reason.split("|")), found
        assert "\n" not in found
        assert len(found) < 300
        assert found.isprintable()
    else:
        assert not reason, found
        assert "root:" not in "".join(section.text for section in found.sections)
        assert all(section.file.isprintable() for section in found.sections)


def test_there_are_at_least_forty_cases() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("levels", [0, 2])
def test_number_of_sections_is_limited(levels: int, tmp_path: Path) -> None:
    """Over all members of nested archives."""
    one = samples.notebook([("markdown", "x")] * 20)
    (tmp_path / "file").write_bytes(quine_like(samples.zipped({f"{i}.ipynb": one for i in range(4)}), levels))
    with (tmp_path / "file").open("rb") as file:
        assert len(extract(file, "a.zip", limits=ExtractionLimits(num_sections=80)).sections) == 80
    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(InvalidArgument, match=r"a\.zip: .*has more than 79 sections"),
    ):
        extract(file, "a.zip", limits=ExtractionLimits(num_sections=79))


def test_long_names_of_members_are_cut(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("\u4e00" * 10_000))
        archive.addfile(tarfile.TarInfo("b/" * 5_000))
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    (tmp_path / "file").write_bytes(out.getvalue())
    with (tmp_path / "file").open("rb") as file:
        found = extract(file, "a.tar")
    assert [(len(each.file), each.reason) for each in found.left_out] == [
        (len("a.tar/") + 512, "has a name of more than 512 characters")
    ] * 2


def test_slow_reader_is_ended(tmp_path: Path) -> None:
    """The kernel ends a process that computes for too long, and the parent one that does not end."""
    (tmp_path / "file").write_bytes(samples.pdf(["x"] * 90))
    with (tmp_path / "file").open("rb") as file, pytest.raises(InvalidArgument, match=r"took more than -5 s"):
        extract(file, "a.pdf", limits=ExtractionLimits(seconds=-5.0))
