"""The client's PEM files. They are checked before TLS uses them, because gRPC's errors do not name the file.

The standard library checks them: clients do not install `cryptography`, which the server needs.
"""

import ssl
from contextlib import suppress
from typing import NoReturn

from longleaf.errors import InvalidArgument
from longleaf.read_limited import read_small

MAX_PEM_BYTES = 1 << 20


def read_certificates(field: str, path: str) -> bytes:
    """Contents of a PEM file of certificates. Raises InvalidArgument."""
    data = read_small(field, path, MAX_PEM_BYTES)
    if not data.strip():
        raise InvalidArgument(field, "is empty")
    try:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), data)
    except ssl.SSLError:
        raise InvalidArgument(field, "has no readable PEM certificate") from None
    return data


def read_pair(tls_cert: str, tls_key: str) -> tuple[bytes, bytes]:
    """Contents of two PEM files: a client certificate followed by its chain, and the private key.

    Raises InvalidArgument naming `tls_cert` or `tls_key` if a file is unreadable, the certificate is expired or not yet
    valid, or the key belongs to another certificate.
    """
    chain, key = read_certificates("tls_cert", tls_cert), read_small("tls_key", tls_key, MAX_PEM_BYTES)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (client, server):
        _load(context, tls_cert, tls_key)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    _trust(server, chain)
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, without its authority
    try:
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        raise InvalidArgument("tls_cert", error.verify_message) from None
    except ssl.SSLError as error:
        raise InvalidArgument("tls_cert", f"cannot be used: {error.reason}") from None
    return chain, key


def _trust(context: ssl.SSLContext, certificates: bytes) -> None:
    context.load_verify_locations(cadata=certificates.decode("ascii", "ignore"))


def _load(context: ssl.SSLContext, tls_cert: str, tls_key: str) -> None:
    try:
        context.load_cert_chain(tls_cert, tls_key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        is_other = error.reason == "KEY_VALUES_MISMATCH"
        message = "is not the key of the certificate in tls_cert" if is_other else "has no readable PEM private key"
        raise InvalidArgument("tls_key", message) from None


def _refuse_passphrase() -> NoReturn:
    raise InvalidArgument("tls_key", "is encrypted; give a key without a passphrase")


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake in memory. Raises SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for end in ends * 2:  # in TLS 1.3 each end needs two turns
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
