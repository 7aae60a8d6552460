"""Certificates and private keys in PEM files, looked through before TLS gets them: its own errors name no file."""

import time
from datetime import UTC
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from longleaf.errors import InvalidArgument
from longleaf.small_files import read_small

MAX_PEM_BYTES = 1 << 20
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


class KeyPair(msgspec.Struct, frozen=True):
    """A certificate chain and the private key of its first one."""

    chain: bytes
    key: bytes
    expires: float
    """When the first certificate does, in seconds since 1970."""


def read_pem(field: str, path: str | Path) -> bytes:
    """What is in a file. Raises InvalidArgument."""
    return read_small(field, path, MAX_PEM_BYTES)


def parse_pair(chain: bytes, key: bytes, fields: tuple[str, str] = ("tls_cert", "tls_key")) -> KeyPair:
    """Raises InvalidArgument naming one of `fields`."""
    first = parse_certificates(chain, fields[0])[0]
    expires = first.not_valid_after_utc.astimezone(UTC)
    if expires.timestamp() <= time.time():
        raise InvalidArgument(fields[0], f"expired at {expires:%Y-%m-%d %H:%M:%S} UTC")
    if _public(first.public_key()) != _public(_parse_key(key, fields[1]).public_key()):
        raise InvalidArgument(fields[1], f"is not the key of the certificate in {fields[0]}")
    return KeyPair(chain, key, expires.timestamp())


def parse_certificates(data: bytes, field: str) -> list[x509.Certificate]:
    """At least one. Raises InvalidArgument."""
    if not data.strip():
        raise InvalidArgument(field, "is empty")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise InvalidArgument(field, "has no certificate in PEM that can be read") from None


def _parse_key(data: bytes, field: str) -> Key:
    if not data.strip():
        raise InvalidArgument(field, "is empty")
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise InvalidArgument(field, "is encrypted; give a key without a passphrase") from None
    except ValueError:
        raise InvalidArgument(field, "has no private key in PEM that can be read") from None
    if not isinstance(key, Key):
        raise InvalidArgument(field, "is neither an RSA nor an ECDSA key, and TLS here takes no other")
    return key


def _public(key: object) -> bytes:
    taken = isinstance(key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey)
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) if taken else b""
