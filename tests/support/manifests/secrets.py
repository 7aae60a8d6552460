"""Contents of the Secrets of a closed service."""

from pathlib import Path

from cryptography import x509

from longleaf.credentials import CredentialEntry, Role, digest_of, line_of, new_credential
from tests.support.authority import Authority
from tests.support.manifests.kubelet import Secrets


def closed(folder: Path) -> tuple[Secrets, dict[Role, str]]:
    """The Secrets, of an authority in `folder`, and a credential of each role."""
    authority = Authority(folder)
    credentials: dict[Role, str] = {"user": new_credential(), "admin": new_credential()}
    entries = [
        CredentialEntry(tenant=f"some-{role}", role=role, digests=(digest_of(each),))
        for role, each in credentials.items()
    ]
    listed = "".join(f"{line_of(entry)}\n" for entry in entries)
    found: Secrets = {
        "longleaf-certificate": _certificate(authority, "longleaf"),
        "longleaf-gateway-certificate": _certificate(authority, "longleaf-gateway"),
        "longleaf-credentials": {"list": listed.encode(), "drain": f"{credentials['admin']}\n".encode()},
    }
    return found, credentials


def _certificate(authority: Authority, name: str) -> dict[str, bytes]:
    certificate, key = authority.make(others=[x509.DNSName(name)])
    return {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.file.read_bytes()}
