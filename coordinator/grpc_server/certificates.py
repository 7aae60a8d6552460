"""TLS certificates of the server, and the authorities that sign client certificates."""

from typing import Any

import grpc

from longleaf.pem import KeyPair, parse_certificates, parse_pair
from longleaf.reloading_files import ReloadingFiles
from longleaf.service_settings import SecurityConfig


class Certificates:
    """The certificate, its key, and the client authorities. New connections use the current content of the files; open
    connections are not affected."""

    def __init__(self, files: ReloadingFiles[tuple[KeyPair, bytes | None]], has_client_authority: bool) -> None:
        self._files = files
        self._has_client_authority = has_client_authority
        self._handed_out = files.value

    @classmethod
    def of(cls, security: SecurityConfig) -> "Certificates | None":
        """Returns the configured certificates; None if TLS is off. Raises InvalidArgument."""
        if security.tls_cert is None or security.tls_key is None:
            return None
        paths = {"tls_cert": security.tls_cert, "tls_key": security.tls_key}
        if security.tls_client_ca is not None:
            paths["tls_client_ca"] = security.tls_client_ca
        return cls(ReloadingFiles(paths, _parse), security.tls_client_ca is not None)

    @property
    def num_failed_reloads(self) -> int:
        """Number of reloads that failed because the new content is invalid."""
        return self._files.num_failed_reloads

    @property
    def is_unusable(self) -> bool:
        """Whether the current content of the files is invalid."""
        return self._files.is_unusable

    @property
    def expires(self) -> float:
        """Expiry of the certificate that new connections get, in seconds since 1970."""
        pair, _ = self._files.value
        return pair.expires

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server port."""
        first = _configuration(*self._handed_out)
        untyped: Any = grpc  # its types do not allow None for "not changed"
        return untyped.dynamic_ssl_server_credentials(first, self._newer, self._has_client_authority)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration for a new connection, or None if it has not changed. gRPC calls this from one of its
        threads."""
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
