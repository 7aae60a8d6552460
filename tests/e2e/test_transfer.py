"""Transfer of contexts between services, and recovery from a storage whose catalog was lost."""

import os
from pathlib import Path

import pytest

from longleaf.client import Client
from longleaf.demo.haystack import make_haystack
from longleaf.errors import StartError
from tests.e2e.test_restart import ask, serving
from tests.support import forked

HAYSTACK = make_haystack(7, 9_000, 2, 0)
QUESTION = HAYSTACK.facts[0].question


def longleaf(*arguments: str) -> str:
    done = forked.run([*forked.CLI, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def export(client: Client, context: str, file: Path) -> None:
    """Exports with keys, which are then on storage."""
    longleaf("contexts", "export", context, str(file), "--server", client.server)


@pytest.mark.extended
def test_context_is_imported_by_a_service_with_a_different_number_of_ranks(tmp_path: Path) -> None:
    archive, again = tmp_path / "book.parcel", tmp_path / "again.parcel"
    with serving(tmp_path / "here", 2) as (_, client):
        client.ingest("book", HAYSTACK.text, display_name="a book")
        expected, _ = ask(client, "book", QUESTION)
        export(client, "book", archive)
    with serving(tmp_path / "there", 1) as (_, client):
        longleaf("contexts", "import", str(archive), "--name", "copy", "--server", client.server)
        copy = client.get_context("copy")
        assert (copy.state, copy.display_name, copy.storage_bytes > archive.stat().st_size // 2) == (
            "parked",
            "a book",
            True,
        )
        assert ask(client, "copy", QUESTION) == (expected, True)
        export(client, "copy", again)
        assert abs(again.stat().st_size - archive.stat().st_size) < 4096, (
            "its keys were restored and are exported unchanged"
        )
        client.delete_context("copy")


@pytest.mark.slow
def test_lost_catalog_is_rebuilt_from_storage(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with serving(data_dir, 2) as (service, client):
        client.ingest("book", HAYSTACK.text, display_name="a book")
        client.fork_context("book", "twig", num_tokens=5_000)
        client.ingest("twig", " The end.", append=True)
        client.ingest("gone", HAYSTACK.text[:5000])
        client.delete_context("gone")
        expected = {name: ask(client, name, QUESTION)[0] for name in ("book", "twig")}
        for name in expected:
            export(client, name, tmp_path / name)
        service.kill()
    (folder,) = data_dir.iterdir()
    for path in folder.glob("catalog.db*"):
        path.write_bytes(os.urandom(5000))
    with pytest.raises(StartError, match="longleaf contexts rebuild"), serving(data_dir, 1):
        pass
    longleaf("contexts", "rebuild", "--from", str(folder / "snapshots"), "--data-dir", str(data_dir))
    with serving(data_dir, 3) as (_, client):
        assert [(one.id, one.state) for one in client.list_contexts()] == [("book", "parked"), ("twig", "parked")]
        for name, answer in expected.items():
            assert ask(client, name, QUESTION) == (answer, True)
