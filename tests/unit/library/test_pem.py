"""Files of certificates and keys that cannot be used are named, with the reason."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from longleaf.errors import InvalidArgument
from longleaf.pem import parse_pair
from tests.support.authority import DAY, Authority, pem_of


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_key_pair_is_loaded_with_its_expiry(authority: Authority) -> None:
    chain, key = authority.make()
    assert parse_pair(chain, key).expires == pytest.approx(parse_pair(*authority.make()).expires, abs=60)


SPOILED: dict[str, tuple[Callable[[Authority], tuple[bytes, bytes]], str, str]] = {
    "an empty certificate": (lambda a: (b" \n", a.make()[1]), "tls_cert", "is empty"),
    "a certificate that is none": (lambda a: (b"hello", a.make()[1]), "tls_cert", "no readable PEM certificate"),
    "half a certificate": (lambda a: (a.make()[0][:200], a.make()[1]), "tls_cert", "no readable PEM certificate"),
    "an expired one": (lambda a: a.make(validity=timedelta(days=-1)), "tls_cert", "expired at 2"),
    "one that is not valid yet": (lambda a: a.make(age=-DAY, validity=2 * DAY), "tls_cert", "is not valid before 2"),
    "a weak key": (lambda a: a.make(key=rsa.generate_private_key(65537, 1024)), "tls_cert", "RSA key of 1,024 bits"),
    "a key of a curve that TLS has not": (
        lambda a: a.make(key=ec.generate_private_key(ec.SECP256K1())),
        "tls_cert",
        "over secp256k1; supported are RSA",
    ),
    "a key of a curve that clients do not take": (
        lambda a: a.make(key=ec.generate_private_key(ec.SECP521R1())),
        "tls_cert",
        "over secp521r1",
    ),
    "a certificate of such a key": (
        lambda a: (a.make(key=ec.generate_private_key(ec.BrainpoolP256R1()))[0], a.make()[1]),
        "tls_cert",
        "over brainpoolP256r1",
    ),
    "an empty key": (lambda a: (a.make()[0], b""), "tls_key", "is empty"),
    "a key that is none": (lambda a: (a.make()[0], b"hello"), "tls_key", "no readable PEM private key"),
    "the key of another": (lambda a: (a.make()[0], a.make()[1]), "tls_key", "not the key of the certificate"),
    "an encrypted key": (
        lambda a: (a.make()[0], pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret")),
        "tls_key",
        "is encrypted",
    ),
    "a key of another kind": (
        lambda a: (a.make()[0], pem_of(ed25519.Ed25519PrivateKey.generate())),
        "tls_key",
        "neither an RSA nor an ECDSA key",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_unusable_files_are_named(authority: Authority, name: str) -> None:
    make, field, reported = SPOILED[name]
    with pytest.raises(InvalidArgument, match=reported) as caught:
        parse_pair(*make(authority))
    assert caught.value.field == field
