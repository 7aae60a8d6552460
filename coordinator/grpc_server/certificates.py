"""The certificates with which a service shows who it is, and by which it knows its clients."""

from typing import Any

import grpc

from longleaf.pem import KeyPair, parse_certificates, parse_pair
from longleaf.reloading_files import ReloadingFiles
from longleaf.service_settings import SecurityConfig


class Certificates:
    """A certificate, its key, and the authorities of clients; new connections get what the files have now, and those
    that are open go on."""

    def __init__(self, files: ReloadingFiles[tuple[KeyPair, bytes | None]], has_client_authority: bool) -> None:
        self._files = files
        self._has_client_authority = has_client_authority
        self._handed_out = files.value

    @classmethod
    def of(cls, security: SecurityConfig) -> "Certificates | None":
        """Those of the settings; None where they ask for none. Raises InvalidArgument."""
        if security.tls_cert is None or security.tls_key is None:
            return None
        paths = {"tls_cert": security.tls_cert, "tls_key": security.tls_key}
        if security.tls_client_ca is not None:
            paths["tls_client_ca"] = security.tls_client_ca
        return cls(ReloadingFiles(paths, _parse), security.tls_client_ca is not None)

    @property
    def num_failed_reloads(self) -> int:
        """How often files changed into what cannot be used."""
        return self._files.num_failed_reloads

    @property
    def is_unusable(self) -> bool:
        """What the files say now cannot be used."""
        return self._files.is_unusable

    @property
    def expires(self) -> float:
        """When the certificate does that new connections get, in seconds since 1970."""
        pair, _ = self._files.value
        return pair.expires

    def credentials(self) -> grpc.ServerCredentials:
        """For a port of a server."""
        first = _configuration(*self._handed_out)
        untyped: Any = grpc  # its types leave out that there may be nothing newer
        return untyped.dynamic_ssl_server_credentials(first, self._newer, self._has_client_authority)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked at the beginning of each connection, in a thread of the library: what it is to have from now on."""
        found = self._files.value
        if found is self._handed_out:
            return None
        self._handed_out = found
        return _configuration(*found)


def _parse(chain: bytes, key: bytes, client_ca: bytes | None = None) -> tuple[KeyPair, bytes | None]:
    if client_ca is not None:
        parse_certificates(client_ca, "tls_client_ca")
    return parse_pair(chain, key), client_ca


def _configuration(pair: KeyPair, client_ca: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], client_ca)
