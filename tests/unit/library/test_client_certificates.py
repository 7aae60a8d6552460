"""Files of certificates and keys that a client cannot use are named, with the reason."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from longleaf.client.certificates import MAX_PEM_BYTES, read_certificates, read_pair
from longleaf.errors import InvalidArgument
from tests.support.authority import DAY, Authority, pem_of

Pair = tuple[bytes, bytes]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)])
def test_valid_files_are_read(authority: Authority, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    pair = authority.make(key=key)
    cert, secret = authority.write("client", ("# Jos\u00e9\n".encode() + pair[0], pair[1]))
    assert read_pair(str(cert), str(secret)) == (cert.read_bytes(), secret.read_bytes())
    assert read_certificates("tls_ca", str(authority.file)) == authority.file.read_bytes()


SPOILED: dict[str, tuple[Callable[[Authority], Pair], str, str]] = {
    "an empty certificate": (lambda a: (b" \n", a.make()[1]), "tls_cert", "is empty"),
    "a certificate that is none": (lambda a: (b"hello", a.make()[1]), "tls_cert", "no readable PEM certificate"),
    "half a certificate": (lambda a: (a.make()[0][:200], a.make()[1]), "tls_cert", "no readable PEM certificate"),
    "an expired one": (lambda a: a.make(validity=timedelta(days=-1)), "tls_cert", "certificate has expired"),
    "one that is not valid yet": (lambda a: a.make(age=-DAY, validity=2 * DAY), "tls_cert", "not yet valid"),
    "an empty key": (lambda a: (a.make()[0], b""), "tls_key", "no readable PEM private key"),
    "a key that is none": (lambda a: (a.make()[0], b"hello"), "tls_key", "no readable PEM private key"),
    "the key of another": (lambda a: (a.make()[0], a.make()[1]), "tls_key", "not the key of the certificate"),
    "an encrypted key": (
        lambda a: (a.make()[0], pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret")),
        "tls_key",
        "is encrypted",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_unusable_files_are_named(authority: Authority, name: str) -> None:
    make, field, reported = SPOILED[name]
    cert, key = authority.write("client", make(authority))
    with pytest.raises(InvalidArgument, match=reported) as caught:
        read_pair(str(cert), str(key))
    assert caught.value.field == field


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tls_ca: .*No such file"):
        read_certificates("tls_ca", str(tmp_path / "none"))
    (tmp_path / "large").write_bytes(bytes(MAX_PEM_BYTES + 1))
    with pytest.raises(InvalidArgument, match="more than 1,048,576 bytes"):
        read_certificates("tls_ca", str(tmp_path / "large"))


def test_irregular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/null")):
        with pytest.raises(InvalidArgument, match=r"tls_ca: .*not a regular file|tls_ca: .*directory"):
            read_certificates("tls_ca", str(path))
