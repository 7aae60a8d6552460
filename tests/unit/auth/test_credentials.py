"""Authentication by a credentials file, and the requirements of such a file."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from coordinator.auth.authenticator import AllowAnonymous
from coordinator.auth.credentials import Credentials
from longleaf.credentials import (
    CredentialEntry,
    Quotas,
    _check_new,
    digest_of,
    line_of,
    new_credential,
    parse_credentials,
)
from longleaf.errors import InvalidArgument, Unauthenticated
from longleaf.reloading_files import LOOK_SECONDS, ReloadingFiles

SECRET = "longleaf-" + "x" * 43  # workers of a test run must agree on it
A, B = (hashlib.sha256(text).hexdigest() for text in (b"a", b"b"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(credential: str) -> dict[str, str | bytes]:
    return {"authorization": f"Bearer {credential}"}


def test_lines_survive() -> None:
    entry = CredentialEntry(
        tenant="acme",
        role="admin",
        digests=(digest_of("a"), digest_of("b")),
        names=("uri:spiffe://x/y", "dns:ops.example"),
        quotas=Quotas(contexts=5, tokens_out_per_minute=7),
    )
    assert parse_credentials(f"# them\n\n{line_of(entry)}  # ours\n".encode()) == (entry,)


def test_new_credentials_are_unique() -> None:
    made = {new_credential() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) > 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no entries"),
        (b"# nobody\n", "no entries"),
        (b"\xef\xbb\xbfacme user sha256:" + A.encode(), "byte-order mark"),
        (b"acme user \xff", "byte 10 is not UTF-8"),
        (b"acme", "line 1: must be TENANT ROLE"),
        (b"acme root sha256:" + A.encode(), "a role is one of user, admin"),
        (b"Acme user sha256:" + A.encode(), "line 1: tenant: must be"),
        (b"contexts user sha256:" + A.encode(), "not one of contexts"),
        (b"acme user", "needs a sha256:"),
        (b"acme user sha256:abc", "word 3 is not sha256:HEX"),
        (b"acme user sha256:" + A.upper().encode(), "word 3"),
        (b"acme user my-secret", "word 3"),
        (f"acme user sha256:{A} cats=3".encode(), "word 4"),
        (f"acme user sha256:{A} contexts=-3".encode(), "word 4"),
        (f"acme user sha256:{A} contexts=1__0".encode(), "word 4"),
        (f"acme user sha256:{A} contexts={'9' * 5000}".encode(), "word 4"),
        (f"acme user sha256:{A} contexts=3 contexts=4".encode(), "word 5 repeats the quota contexts"),
        (
            f"acme user sha256:{A} context=3".encode(),
            "word 4 is not one of the quotas contexts, tokens,",
        ),
        (f"acme user sha256:{A} tokens=2M".encode(), "word 4 must be tokens=NUMBER with 1 to 15 digits"),
        (f"acme user {SECRET}".encode(), "word 3 looks like a credential: put the line of `longleaf cre"),
        (SECRET.encode(), "word 1 looks like a credential"),
        (f"acme user sha256:{A}\nacme admin sha256:{B}".encode(), "line 2: tenant acme already has a line"),
        (
            f"acme user sha256:{A}\nbolt admin sha256:{A}".encode(),
            "line 2: bolt has a credential or a name that belongs to acme",
        ),
        (b"acme user dns:x\nbolt admin dns:x", "line 2"),
    ],
)
def test_invalid_files_are_rejected(text: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_credentials(text)
    assert message in str(refused.value)
    assert "my-secret" not in str(refused.value)
    assert SECRET not in str(refused.value)


def test_large_files_are_parsed_quickly() -> None:
    num_looks = 0

    class Digest(bytes):
        def __hash__(self) -> int:
            nonlocal num_looks
            num_looks += 1
            return super().__hash__()

    owners = dict[bytes | str, str]()
    for number in range(1000):
        _check_new(CredentialEntry(tenant=f"t{number}", role="user", digests=(Digest(b"%d" % number),)), owners, number)
    assert num_looks == 1000


def test_tenant_name_may_equal_the_credential_prefix() -> None:
    assert parse_credentials(f"longleaf-ops user sha256:{A}".encode())[0].tenant == "longleaf-ops"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "credentials"
    path.write_text(f"acme user sha256:{A} contexts=3\nops admin sha256:{B} uri:spiffe://ops dns:ops.example\n")
    return path


def test_callers_are_identified_by_credential_or_certificate(file: Path) -> None:
    credentials = Credentials.of(str(file))
    acme = credentials.authenticate(bearer("a"), [])
    assert (acme.tenant, acme.role, acme.quotas) == ("acme", "user", Quotas(contexts=3))
    for found in (
        credentials.authenticate(bearer("b"), []),
        credentials.authenticate({}, ["dns:elsewhere", "dns:ops.example"]),
        credentials.authenticate({}, ["uri:spiffe://ops"]),
    ):
        assert (found.tenant, found.is_admin) == ("ops", True)
    assert credentials.num_refused == 0


def test_credential_takes_precedence_over_certificate(file: Path) -> None:
    assert Credentials.of(str(file)).authenticate(bearer("a"), ["dns:ops.example"]).tenant == "acme"


@pytest.mark.parametrize("headers", [{}, bearer("c"), bearer(""), {"authorization": "a"}, {"authorization": "Basic a"}])
def test_unknown_callers_are_refused_and_counted(file: Path, headers: dict[str, str | bytes]) -> None:
    credentials = Credentials.of(str(file))
    with pytest.raises(Unauthenticated):
        credentials.authenticate(headers, ["dns:elsewhere", "ops.example", "uri:ops.example", "dns:spiffe://ops"])
    assert credentials.num_refused == 1


def test_without_a_file_every_caller_is_the_local_admin() -> None:
    assert AllowAnonymous().authenticate({}, []).is_admin


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        Credentials.of(str(tmp_path / "none"))


def test_file_is_reloaded_when_its_content_changes(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watched = ReloadingFiles({"credentials": str(file)}, parse_credentials, clock)
    credentials = Credentials(watched)
    file.write_text(f"bolt user sha256:{A}")
    assert credentials.authenticate(bearer("a"), []).tenant == "acme"  # the file has not been checked yet
    clock.now += LOOK_SECONDS
    assert credentials.authenticate(bearer("a"), []).tenant == "bolt"
    with pytest.raises(Unauthenticated):
        credentials.authenticate(bearer("b"), [])


def test_broken_file_keeps_the_credentials_and_is_logged_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    credentials = Credentials(ReloadingFiles({"credentials": str(file)}, parse_credentials, clock))
    file.write_text("half a line")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += LOOK_SECONDS
            assert credentials.authenticate(bearer("a"), []).tenant == "acme"
    assert credentials.num_failed_reloads == len(caplog.records) == 1
    assert credentials.is_unusable
    file.unlink()
    clock.now += LOOK_SECONDS
    assert credentials.authenticate(bearer("a"), []).tenant == "acme"
    assert credentials.num_failed_reloads == 2
    file.write_text(f"bolt user sha256:{A}")
    clock.now += LOOK_SECONDS
    assert credentials.authenticate(bearer("a"), []).tenant == "bolt"
    assert credentials.num_failed_reloads == 2
    assert not credentials.is_unusable


def test_pipe_in_place_of_the_file_does_not_block(file: Path) -> None:
    clock = Clock()
    credentials = Credentials(ReloadingFiles({"credentials": str(file)}, parse_credentials, clock))
    file.unlink()
    os.mkfifo(file)
    clock.now += LOOK_SECONDS
    assert credentials.authenticate(bearer("a"), []).tenant == "acme"
    assert credentials.num_failed_reloads == 1


def test_any_error_during_a_reload_counts_as_a_failed_reload(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    def parse(data: bytes) -> tuple[CredentialEntry, ...]:
        if b"secret" in data:
            raise ZeroDivisionError(data)
        return parse_credentials(data)

    credentials = Credentials(ReloadingFiles({"credentials": str(file)}, parse, clock))
    file.write_text("secret")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            clock.now += LOOK_SECONDS
            assert credentials.authenticate(bearer("a"), []).tenant == "acme"
    (record,) = caplog.records
    assert (credentials.num_failed_reloads, "ZeroDivisionError" in record.getMessage()) == (1, True)
    assert "secret" not in record.getMessage()


def test_repair_is_logged_at_the_level_of_the_failure(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, before = Clock(), file.read_text()
    watched = ReloadingFiles({"credentials": str(file)}, parse_credentials, clock)
    with caplog.at_level(logging.WARNING):
        for text in ("half a line", before, before, f"bolt user sha256:{A}"):
            file.write_text(text)
            clock.now += LOOK_SECONDS
            assert watched.value
    broken, mended = caplog.records
    assert "the previous content stays in use" in broken.getMessage()
    assert f"loaded {file} after an earlier error" in mended.getMessage()
    assert {record.name for record in caplog.records} == {"longleaf.reloads"}
