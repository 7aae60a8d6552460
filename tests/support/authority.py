"""An authority that makes certificates, and files of them."""

import asyncio
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from longleaf.client.channels import Access

DAY = timedelta(days=1)
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


class Authority:
    """Makes certificates that are valid for a day, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of tests")])
        own = self._builder(self._name, self._key, DAY).add_extension(x509.BasicConstraints(True, None), True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def _builder(
        self, name: x509.Name, key: Key, validity: timedelta, age: timedelta = 2 * DAY
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - age)
            .not_valid_after(now + validity)
        )

    def make(
        self,
        *uris: str,
        key: Key | None = None,
        validity: timedelta = DAY,
        age: timedelta = 2 * DAY,
        others: Sequence[x509.GeneralName] = (),
    ) -> tuple[bytes, bytes]:
        """A certificate for this machine, `uris` and `others`, and its key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names: Sequence[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ip_address("127.0.0.1")),
            *map(x509.UniformResourceIdentifier, uris),
            *others,
        ]
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "someone")])
        builder = self._builder(name, key, validity, age).add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM), pem_of(key)

    def write(self, name: str, pair: tuple[bytes, bytes] | None = None) -> tuple[Path, Path]:
        """Files of a pair; None: a new one for this machine."""
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        for file, data in zip(files, pair or self.make(), strict=True):
            file.write_bytes(data)
        return files

    def access(self, name: str = "", *uris: str, credential: str = "") -> Access:
        """The access options of a client that trusts this authority; `name` adds a client certificate."""
        access = Access(tls_ca=self.file, tls_cert="", tls_key="", credential=credential)
        if name:
            access["tls_cert"], access["tls_key"] = self.write(name, self.make(*uris))
        return access


async def shown_serial(address: str, trusting: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection gets."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(found).serial_number
    finally:
        writer.close()


def pem_of(key: Key, passphrase: bytes = b"") -> bytes:
    encryption: KeySerializationEncryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
