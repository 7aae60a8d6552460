"""Files of `longleaf ingest`: kinds, folders, names, headers, and errors by file."""

from pathlib import Path

import pytest

from longleaf.cli.document_files import choose_name
from longleaf.errors import InvalidArgument
from tests.support import document_samples as samples
from tests.support.service import byte_tokenizer
from tests.support.terminal import Terminal


def written(folder: Path, files: dict[str, str | bytes]) -> list[str]:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return [str(folder / name) for name in files]


def text_of(terminal: Terminal, context: str) -> str:
    return byte_tokenizer().decode(terminal.engine.contexts[context])


async def test_files_of_all_kinds_become_one_document(terminal: Terminal, tmp_path: Path) -> None:
    """Each file begins with its name, and a folder stands for its files."""
    files: dict[str, str | bytes] = {"report.pdf": samples.pdf(["Page one", "Page two"]), "slides.pptx": samples.pptx()}
    files |= {"notes/a.md": "# A\n", "notes/.env": "SECRET", "notes/logo.png": b"\x89PNG\r\n\x1a\n\0"}
    written(tmp_path, files)
    arguments = [str(tmp_path / name) for name in ("report.pdf", "slides.pptx", "notes")]
    code, _, err = await terminal.run("ingest", *arguments, "--name", "work")
    assert code == 0, err
    assert text_of(terminal, "work").endswith(
        f"===== {tmp_path}/report.pdf =====\n\nPage one\n\nPage two\n\n\n\n"
        f"===== {tmp_path}/slides.pptx =====\n\n# Title\n\nBody\n\nNotes: Notes\n\n\n\n"
        "===== notes/a.md =====\n\n# A\n"
    )
    assert err.splitlines()[:3] == [
        "notes/.env is hidden",
        "notes/logo.png is a PNG image",
        "3 files with text, 2 left out",
    ]


async def test_single_file_has_no_header_and_names_the_context(terminal: Terminal, tmp_path: Path) -> None:
    [file] = written(tmp_path, {"Employee Handbook (2026).txt": "Grüße\r\n"})
    [context] = await terminal.json("ingest", file)
    assert context["id"] == "employee-handbook-2026"
    assert text_of(terminal, "employee-handbook-2026").endswith("Grüße\r\n")
    assert "=====" not in text_of(terminal, "employee-handbook-2026")
    await terminal.json("ingest", file, "--name", "other", "--file-headers")
    assert text_of(terminal, "other").endswith(f"===== {file} =====\n\nGrüße\r\n")


async def test_charset_and_byte_order_marks_are_honoured(terminal: Terminal, tmp_path: Path) -> None:
    [latin, utf16, bom] = written(
        tmp_path, {"latin": "Grüße".encode("iso-8859-1"), "utf16": "Grüße".encode("utf-16"), "bom": "\ufeffGrüße"}
    )
    for name, arguments in (("a", (latin, "--encoding", "latin1")), ("b", (utf16,)), ("c", (bom,))):
        await terminal.json("ingest", *arguments, "--name", name)
        assert text_of(terminal, name).endswith("Grüße")
        assert "\ufeff" not in text_of(terminal, name)
    code, _, err = await terminal.run("ingest", utf16, latin, "--name", "d")
    assert (code, err.splitlines()[-1]) == (2, f"error: {latin}: is not UTF-8 at byte 2: invalid start byte")


async def test_plain_text_keeps_markup(terminal: Terminal, tmp_path: Path) -> None:
    [page] = written(tmp_path, {"page.html": "<p>Hi</p>"})
    await terminal.json("ingest", page, "--name", "a")
    await terminal.json("ingest", page, "--name", "b", "--plain-text")
    assert text_of(terminal, "a").endswith("Hi\n\n")
    assert text_of(terminal, "b").endswith("<p>Hi</p>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"text", "is named .docx, but is not a Word document"),
        ("a.pdf", samples.pdf([""]), "has 1 page and no text: if it is a scan, recognize its text first (OCR)"),
        ("a.xlsx", samples.zipped({"xl/workbook.xml": ""}), "is a spreadsheet: save its sheets as CSV"),
        ("a.rtf", b"{\\rtf1}", "is an RTF document: save it as .docx or PDF"),
        ("a\x1b[1m.txt", b"\xff", "is not UTF-8 at byte 0: invalid start byte"),
    ],
)
async def test_files_that_cannot_be_read_are_named(
    terminal: Terminal, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    [file] = written(tmp_path, {name: content})
    code, out, err = await terminal.run("ingest", file, "--name", "x")
    assert (code, out) == (2, "")
    assert err == f"error: {file}: {message}\n".replace("\x1b", "\ufffd")
    assert not terminal.engine.contexts


async def test_folder_without_text_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    written(tmp_path, {"x/a.png": b"\x89PNG\r\n\x1a\n\0", "x/b.png": b"\x89PNG\r\n\x1a\n\0"})
    code, _, err = await terminal.run("ingest", str(tmp_path / "x"))
    assert (code, err) == (2, "each is a PNG image: x/a.png, x/b.png\nerror: x: has no file with text\n")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Moby Dick (1851).txt", "moby-dick-1851"),
        ("notes/Straße.tar.gz", "strasse"),
        ("Résumé.PDF", "resume"),
        ("a.b", "a.b"),
        ("!!!", "document"),
        ("x" * 100, "x" * 63),
    ],
)
def test_name_of_the_context_is_that_of_the_file(file: str, name: str) -> None:
    assert choose_name("", [file], append=False) == name


def test_name_is_required_where_it_cannot_be_derived() -> None:
    for files, append in ((["a", "b"], False), (["-"], False), (["a"], True)):
        with pytest.raises(InvalidArgument, match="--name: is required"):
            choose_name("", files, append)
