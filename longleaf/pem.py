"""Certificates and private keys in PEM files. They are checked before TLS uses them, because its errors do not name the
file."""

import time

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from longleaf.errors import InvalidArgument

MIN_RSA_BITS = 2048
CURVES = ("secp256r1", "secp384r1")
"""P-256 and P-384. gRPC's server accepts other curves, but its clients do not."""
KEYS_HINT = f"supported are RSA keys of at least {MIN_RSA_BITS:,} bits and ECDSA keys over P-256 or P-384"


class KeyPair(msgspec.Struct, frozen=True):
    """A certificate chain and the private key of its first certificate."""

    chain: bytes
    key: bytes
    expires: float
    """Expiry of the first certificate, in seconds since the Unix epoch."""


def parse_pair(chain: bytes, key: bytes, fields: tuple[str, str] = ("tls_cert", "tls_key")) -> KeyPair:
    """Raises InvalidArgument naming one of `fields`."""
    first = parse_certificates(chain, fields[0])[0]
    begins, expires = first.not_valid_before_utc, first.not_valid_after_utc
    if expires.timestamp() <= time.time():
        raise InvalidArgument(fields[0], f"expired at {expires:%Y-%m-%d %H:%M:%S} UTC")
    if begins.timestamp() > time.time():
        raise InvalidArgument(fields[0], f"is not valid before {begins:%Y-%m-%d %H:%M:%S} UTC")
    if _public_of(first, fields[0]) != _der(_parse_key(key, fields[1])):
        raise InvalidArgument(fields[1], f"is not the key of the certificate in {fields[0]}")
    return KeyPair(chain, key, expires.timestamp())


def parse_certificates(data: bytes, field: str) -> list[x509.Certificate]:
    """At least one certificate. Raises InvalidArgument."""
    if not data.strip():
        raise InvalidArgument(field, "is empty")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise InvalidArgument(field, "has no readable PEM certificate") from None


def _parse_key(data: bytes, field: str) -> PublicKeyTypes:
    """The public key of a private key. Raises InvalidArgument."""
    if not data.strip():
        raise InvalidArgument(field, "is empty")
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise InvalidArgument(field, "is encrypted; give a key without a passphrase") from None
    except UnsupportedAlgorithm:
        raise InvalidArgument(field, KEYS_HINT) from None
    except ValueError:
        raise InvalidArgument(field, "has no readable PEM private key") from None
    return _taken(key.public_key(), field)


def _public_of(certificate: x509.Certificate, field: str) -> bytes:
    """Raises InvalidArgument."""
    try:
        key = certificate.public_key()
    except (UnsupportedAlgorithm, ValueError):
        raise InvalidArgument(field, f"has an unreadable key; {KEYS_HINT}") from None
    return _der(_taken(key, field))


def _taken(key: PublicKeyTypes, field: str) -> PublicKeyTypes:
    """Returns `key`. Raises InvalidArgument for a key that gRPC clients do not accept."""
    match key:
        case rsa.RSAPublicKey() if key.key_size >= MIN_RSA_BITS:
            return key
        case ec.EllipticCurvePublicKey() if key.curve.name in CURVES:
            return key
        case rsa.RSAPublicKey():
            message = f"is an RSA key of {key.key_size:,} bits"
        case ec.EllipticCurvePublicKey():
            message = f"is a key over {key.curve.name}"
        case _:
            message = "is neither an RSA nor an ECDSA key"
    raise InvalidArgument(field, f"{message}; {KEYS_HINT}")


def _der(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
