"""The text of contexts in services that are killed, and across forks, appends and transfers."""

import json
from pathlib import Path

import pytest

from longleaf.client import Client
from longleaf.demo.haystack import make_haystack
from tests.e2e.test_restart import serving
from tests.support import document_samples as samples
from tests.support import forked

PROSE = make_haystack(7, 3_000, 2, 0).text.encode()
NOTES = "\n\nThe whale 白鯨 — \r\nsurfaces.\n".encode()


def longleaf(*arguments: str) -> str:
    done = forked.run([*forked.CLI, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(client: Client, name: str, text: bytes, file: str, begins: int) -> None:
    """Checks the text of a file from this byte."""
    for start, end in ((begins, begins + 20), (begins + 7, len(text)), (len(text) - 3, len(text))):
        found = client.get_context_text(name, byte_start=start, byte_end=end)
        assert found.byte_start is not None and found.byte_end is not None
        assert found.text.encode() == text[found.byte_start : found.byte_end]
        assert found.byte_start <= start and end <= found.byte_end
        assert (found.file, found.line) == (file, 1 + text.count(b"\n", begins, found.byte_start))


@pytest.mark.extended
def test_text_survives_restart_and_export_with_its_context(tmp_path: Path) -> None:
    book, notes, archive = tmp_path / "book.txt", tmp_path / "notes.txt", tmp_path / "twig.archive"
    report = tmp_path / "report.pdf"
    report.write_bytes(samples.pdf(["First page", "Second page"]))
    book.write_bytes(PROSE)
    notes.write_bytes(NOTES)
    with serving(tmp_path / "data", 2) as (service, client):
        longleaf("ingest", str(book), str(notes), "--no-file-headers", "--name", "book", "--server", client.server)
        longleaf("ingest", str(report), "--name", "report", "--server", client.server)
        found = client.get_context_text("report", byte_start=len("First page\n\n"), byte_end=22)
        assert (found.text[:6], found.file) == ("Second", f"{report}, page 2")
        check(client, "book", PROSE + NOTES, str(notes), len(PROSE))
        cut = client.get_context_text("book", byte_start=0, byte_end=1_003).token_end
        client.fork_context("book", "twig", num_tokens=cut)
        client.ingest("twig", notes, append=True)
        resident = client.get_context_text("book", 0, cut).byte_end
        assert resident is not None and resident < len(PROSE)
        twig = PROSE[:resident] + NOTES
        check(client, "twig", twig, str(notes), resident)
        service.kill()
    with serving(tmp_path / "data", 1) as (_, client):
        check(client, "book", PROSE + NOTES, str(notes), len(PROSE))
        check(client, "twig", twig, str(notes), resident)
        client.export_context("twig", archive, with_keys=False)
    with serving(tmp_path / "there", 1) as (_, client):
        client.import_context(archive, "came")
        check(client, "came", twig, str(notes), resident)
        given = ("contexts", "text", "came", "--bytes", f"{resident}-{resident + 12}", "--server", client.server)
        assert longleaf(*given) == NOTES[:12].decode() + "\n"
        answer = json.loads(longleaf(*given, "--json"))
        assert (answer["file"], answer["line"], answer["byte_start"]) == (str(notes), 1, resident)
