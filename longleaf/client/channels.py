"""Channels to a service: plain or encrypted, with or without a credential."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import grpc

from longleaf.client.addresses import target_of
from longleaf.client.certificates import read_certificates, read_pair
from longleaf.config import CLIENT_NAME, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from longleaf.errors import InvalidArgument
from longleaf.service_settings import is_loopback

OPTIONS = (
    ("grpc.primary_user_agent", CLIENT_NAME),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # detects a peer that vanished, so that the call ends
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),  # short, so that it does not delay retries
    ("grpc.min_reconnect_backoff_ms", 5_000),  # time limit for connecting
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
)
MAX_CREDENTIAL = 4096
"""Maximum length in characters."""


class Access(TypedDict, total=False):
    """TLS and authentication settings. Missing ones are read from the environment; "" disables a setting regardless of
    the environment."""

    tls_ca: str | Path | None
    """PEM file with the certificate authorities of the service; enables encryption. LONGLEAF_TLS_CA."""
    tls_cert: str | Path | None
    """File with the client's certificate chain, if the service requires one. LONGLEAF_TLS_CERT."""
    tls_key: str | Path | None
    """File with the private key of that certificate. LONGLEAF_TLS_KEY."""
    credential: str | None
    """Bearer credential of the caller; requires tls_ca except on the same machine. LONGLEAF_CREDENTIAL."""
    insecure: bool
    """Permits sending credentials to another machine in plain text."""


def open_channel(server: str, access: Access) -> Any:
    """A channel to `server`. Reads the files immediately. Raises InvalidArgument."""
    tls_ca, tls_cert, tls_key = (_given(access, name) for name in ("tls_ca", "tls_cert", "tls_key"))
    credential = _given(access, "credential")
    for name, value, other in (("tls_cert", tls_cert, tls_key), ("tls_key", tls_key, tls_cert)):
        if value and not other:
            raise InvalidArgument(name, f"requires {'tls_key' if name == 'tls_cert' else 'tls_cert'}")
        if value and not tls_ca:
            raise InvalidArgument(name, "requires tls_ca: the connection is not encrypted without it")
    if credential:
        check_credential(credential, server, access)
    channel = _encrypted(server, tls_ca, tls_cert, tls_key) if tls_ca else _plain(server)
    return BearerChannel(channel, credential) if credential else channel


def is_encrypted(access: Access) -> bool:
    """Whether a channel with these settings is encrypted."""
    return bool(_given(access, "tls_ca"))


def _given(access: Access, name: str) -> str:
    value = access.get(name)
    return os.environ.get(f"LONGLEAF_{name.upper()}", "") if value is None else str(value)


def check_credential(credential: str, server: str, access: Access) -> None:
    """Raises InvalidArgument for a malformed credential, and for one that would be sent in plain text."""
    if not (credential.isascii() and credential.isprintable() and " " not in credential):
        raise InvalidArgument("credential", "must be printable ASCII without spaces")
    if len(credential) > MAX_CREDENTIAL:
        raise InvalidArgument("credential", f"has {len(credential):,} characters, more than {MAX_CREDENTIAL:,}")
    is_safe = bool(_given(access, "tls_ca")) or access.get("insecure", False)
    host = server.rpartition(":")[0].strip("[]")
    if not (is_safe or is_loopback(host) or server.startswith("unix:")):
        raise InvalidArgument("credential", f"would be sent to {host} in plain text: give tls_ca")


def _plain(server: str) -> grpc.aio.Channel:
    target, options = target_of(server), OPTIONS
    if target != server:
        options = (*OPTIONS, ("grpc.default_authority", server))
    return grpc.aio.insecure_channel(target, options=options)


def _encrypted(server: str, tls_ca: str, tls_cert: str, tls_key: str) -> grpc.aio.Channel:
    roots = read_certificates("tls_ca", tls_ca)
    chain, key = read_pair(tls_cert, tls_key) if tls_cert else (None, None)
    target, options = target_of(server), OPTIONS
    if target != server:  # the certificate is for the requested name
        options = (*OPTIONS, ("grpc.ssl_target_name_override", server.rpartition(":")[0]))
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots, key, chain), options=options)


class BearerChannel:
    """A channel that sends a credential with every call. Does not use gRPC's call credentials, which require an
    encrypted channel, nor its interceptors, which change how calls end."""

    def __init__(self, channel: Any, credential: str) -> None:
        self._channel = channel
        self._metadata: Sequence[tuple[str, str]] = (("authorization", f"Bearer {credential}"),)

    def _with_credential(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return partial(make(*arguments, **options), metadata=self._metadata)

    def __getattr__(self, name: str) -> Any:
        """Methods that create calls add the credential. All other attributes are those of the channel."""
        found = getattr(self._channel, name)
        is_maker = name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        return partial(self._with_credential, found) if is_maker else found
