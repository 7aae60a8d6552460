"""Contexts of tenants keep their owner across restarts and transfers."""

import random
from array import array
from pathlib import Path

import pytest

from longleaf.client import Client
from longleaf.errors import AlreadyExists, NotFound
from longleaf.tenants import DEFAULT_TENANT
from tests.e2e.test_restart import ask
from tests.support.command_line import Served
from tests.support.tenanted import Tenanted
from tests.support.tenants import ACME, BOLT

TEXTS = {
    DEFAULT_TENANT: "Before there were gateways, the village kept its bread on the square.\n" * 20,
    ACME: "The lighthouse keeper wrote of storms, and of ships that never came.\n" * 20,
    BOLT: "A clock maker of Prague counted minutes that nobody else had seen.\n" * 30,
}
QUESTION = "Who wrote?"


def options(checkpoint: Path, data_dir: Path, world_size: int = 2) -> tuple[str, ...]:
    given = ("--model", str(checkpoint), "--launcher", "local", "--kv-bytes", "8000000")
    return *given, "--world-size", str(world_size), "--data-dir", str(data_dir)


def names(client: Client) -> list[str]:
    return [context.id for context in client.list_contexts()]


@pytest.mark.slow
def test_tenants_keep_their_contexts_and_unowned_ones_go_to_the_default_tenant(
    checkpoint: Path, tmp_path: Path
) -> None:
    answers: dict[str, tuple[int, ...]] = {}
    with Served(*options(checkpoint, tmp_path / "data")) as service, Client(service.address) as client:
        client.ingest("book", TEXTS[DEFAULT_TENANT])
        answers[DEFAULT_TENANT], _ = ask(client, "book", QUESTION)
        assert service.stop() == 0
    with Tenanted(tmp_path, *options(checkpoint, tmp_path / "data")) as tenanted:
        for tenant in (ACME, BOLT):
            with tenanted.client(tenant) as client:
                assert names(client) == [], "earlier contexts belong to the default tenant"
                client.ingest("book", TEXTS[tenant])
                answers[tenant], _ = ask(client, "book", QUESTION)
        assert tenanted.served.stop() == 0
    assert len(set(answers.values())) == len(answers)
    again = Tenanted(tmp_path, *options(checkpoint, tmp_path / "data", world_size=1), others=[DEFAULT_TENANT])
    with again as tenanted:
        for tenant, answer in answers.items():
            with tenanted.client(tenant) as client:
                assert names(client) == ["book"]
                assert ask(client, "book", QUESTION) == (answer, True), tenant
                client.delete_context("book")
                assert names(client) == []
        assert tenanted.served.stop() == 0


@pytest.mark.slow
def test_archive_belongs_to_its_importer_and_contains_no_other_data(checkpoint: Path, tmp_path: Path) -> None:
    """The archive of acme's `excerpt`, the first part of `secret`, contains nothing of the rest."""
    draw, archive, whole = random.Random(5), tmp_path / "excerpt.parcel", tmp_path / "secret.parcel"
    with Tenanted(tmp_path, *options(checkpoint, tmp_path / "data")) as tenanted:
        with tenanted.client(ACME) as acme, tenanted.client(BOLT) as bolt:
            ids = [draw.randrange(3, 500) for _ in range(400)]
            acme.ingest("secret", ids)
            acme.ingest("other", TEXTS[BOLT])
            acme.fork_context("secret", "excerpt", num_tokens=len(ids) * 3 // 4)
            acme.export_context("secret", whole)
            acme.export_context("excerpt", archive)
            expected, _ = ask(acme, "excerpt", QUESTION)
            bolt.ingest("excerpt", TEXTS[BOLT])
            with pytest.raises(AlreadyExists):
                bolt.import_context(archive)
            bolt.delete_context("excerpt")
            assert bolt.import_context(archive).id == "excerpt"
            assert (names(bolt), names(acme)) == (["excerpt"], ["excerpt", "other", "secret"])
            assert ask(bolt, "excerpt", QUESTION)[0] == expected
            acme.delete_context("excerpt")
            assert ask(bolt, "excerpt", QUESTION)[0] == expected
            with pytest.raises(NotFound):
                bolt.export_context("secret", tmp_path / "none")
        assert tenanted.served.stop() == 0
    tail = array("I", ids[-20:]).tobytes()
    assert tail in whole.read_bytes()
    reported = archive.read_bytes()
    assert tail not in reported
    for word in (b"acme", b"secret", b"other", str(tmp_path).encode()):
        assert word not in reported, word
