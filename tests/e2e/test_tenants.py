"""Tenants of a whole service: each authenticates over TLS and sees only its own objects."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.e2e.test_commands import expected
from tests.support import forked
from tests.support.authority import DAY, Authority, pem_of
from tests.support.command_line import CLI
from tests.support.tenanted import Tenanted
from tests.support.tenants import ACME, BOLT, OPS, credential_of

TEXTS = {
    ACME: "The lighthouse keeper wrote of storms, and of ships that never came.\n" * 20,
    BOLT: "A clock maker of Prague counted minutes that nobody else had seen.\n" * 30,
}
QUESTION = "Who wrote?"
LAUNCHERS = ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])]


@pytest.fixture(scope="module", params=LAUNCHERS)
def service(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenanted]:
    """A service of two ranks in which acme and bolt each have a `book`."""
    folder = tmp_path_factory.mktemp("tenants")
    options = ("--model", str(checkpoint), "--world-size", "2", "--launcher", request.param)
    options += ("--kv-bytes", "8000000", "--data-dir", str(folder / "data"), "--drain-seconds", "20")
    with Tenanted(folder, *options) as service:
        for tenant, text in TEXTS.items():
            service.ingest(tenant, "book", text)
        yield service
        drained = service.run_as(OPS, "drain", "--wait")
        assert (drained.returncode, drained.stdout) == (0, "drained\n"), drained.stderr
        assert service.served.process.wait(60) == 0
        assert service.served.process.stdout is not None
        written = service.served.output + service.served.process.stdout.read()
        assert not [secret for secret in service.secrets() if secret in written]


def test_each_tenant_gets_answers_from_its_own_book(service: Tenanted, checkpoint: Path) -> None:
    """Equals the answer of a single device: ids of transformers' generate for that tenant's text."""
    answers = {tenant: service.ask(tenant, "book", QUESTION, 24) for tenant in TEXTS}
    for tenant, text in TEXTS.items():
        assert answers[tenant] == expected(checkpoint, f"{text}\n\n{QUESTION}", 24), tenant
    assert answers[ACME] != answers[BOLT]


@pytest.mark.extended
def test_each_tenant_lists_its_own_contexts_and_an_admin_sees_no_more(service: Tenanted) -> None:
    service.ingest(BOLT, "play", "only for bolt")
    assert (service.names(ACME), service.names(BOLT), service.names(OPS)) == (["book"], ["book", "play"], [])
    result = service.run_as(ACME, "contexts", "show", "play")
    missing = service.run_as(ACME, "contexts", "show", "none")
    assert (result.returncode, missing.returncode) == (2, 2)
    assert result.stderr.replace("play", "none") == missing.stderr
    service.run_as(BOLT, "contexts", "delete", "play")


def test_credential_in_the_environment_identifies_the_caller(service: Tenanted) -> None:
    access = {"LONGLEAF_TLS_CA": str(service.authority.file), "LONGLEAF_CREDENTIAL": credential_of(BOLT)}
    found = service.run("contexts", "show", "book", "--json", **access)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["tokens"] == service.json_as(BOLT, "contexts", "show", "book")["tokens"]
    assert json.loads(found.stdout)["tokens"] != service.json_as(ACME, "contexts", "show", "book")["tokens"]


def test_wrong_credential_is_reported_in_one_line(service: Tenanted, tmp_path: Path) -> None:
    ca = str(service.authority.file)
    wrong = {"LONGLEAF_CREDENTIAL": "longleaf-another"}
    for environment, reported in (
        (wrong, "unknown credential"),
        ({}, "this service requires a credential: give --credential-file"),
    ):
        found = service.run("contexts", "list", "--tls-ca", ca, **environment)
        check_line(found, 2, reported)
        assert "longleaf-another" not in found.stderr
    check_line(service.run("contexts", "list", "--tls-ca", ca, "--credential-file", str(tmp_path / "none")), 2, "none")


def test_plaintext_client_of_a_tls_service_gets_an_error(service: Tenanted) -> None:
    found = service.run("contexts", "list", LONGLEAF_CREDENTIAL=credential_of(ACME))
    check_line(found, 2, "--tls-ca: ")
    assert "requires TLS: give its certificate authority here or in LONGLEAF_TLS_CA" in found.stderr


def test_client_with_another_authority_gets_an_error(service: Tenanted, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    found = service.run("contexts", "list", "--tls-ca", str(other.file), LONGLEAF_CREDENTIAL=credential_of(ACME))
    check_line(found, 2, "has a certificate that is not signed by an authority in --tls-ca or LONGLEAF_TLS_CA")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tenant", [ACME, BOLT])
@pytest.mark.parametrize("command", [["drain"], ["drain", "--wait"], ["verify"], ["reset-slots"]])
def test_admin_calls_are_refused_to_users(service: Tenanted, tenant: str, command: list[str]) -> None:
    check_line(service.run_as(tenant, *command), 2, "requires the role admin")
    assert service.names(tenant) == ["book"]


def check_line(found: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    assert (found.returncode, found.stdout) == (code, "")
    [line] = found.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("another's", "--tls-key: is not the key of the certificate in --tls-cert"),
        ("missing", "--tls-key: "),
        ("encrypted", "--tls-key: is encrypted"),
        ("expired", "--tls-cert: expired"),
    ],
)
def test_unusable_tls_keys_are_reported_by_their_option(
    checkpoint: Path, tmp_path: Path, made: str, message: str
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.write("server")
    if made == "another's":
        _, key = authority.write("other")
    elif made == "missing":
        key = tmp_path / "nowhere"
    elif made == "encrypted":
        secret = ec.generate_private_key(ec.SECP256R1())
        cert, key = authority.write("server", (authority.make(key=secret)[0], pem_of(secret, b"passphrase")))
    else:
        cert, key = authority.write("server", authority.make(validity=-DAY))
    check_does_not_start(checkpoint, message, "--tls-cert", str(cert), "--tls-key", str(key))


@pytest.mark.parametrize("has_credentials", [False, True])
def test_service_beyond_the_loopback_requires_tls(checkpoint: Path, tmp_path: Path, has_credentials: bool) -> None:
    given = ("--credentials", str(tmp_path / "credentials")) if has_credentials else ()
    check_does_not_start(checkpoint, "--insecure", "--host", "0.0.0.0", *given)


def check_does_not_start(checkpoint: Path, message: str, *options: str) -> None:
    command = [*CLI, "serve", "--model", str(checkpoint), "--port", "0", "--launcher", "local", *options]
    found = forked.run(command)
    assert (found.returncode, found.stdout) == (2, "")
    *others, line = found.stderr.splitlines()
    assert others in ([], ["starting 1 rank (local) …"])
    assert line.startswith("error: ")
    assert message in line
