"""Resolution of `localhost`, and detection of TLS at a server's address."""

import asyncio
import socket
import ssl

LOOPBACKS = (("ipv4:127.0.0.1", "127.0.0.1"), ("ipv6:[::1]", "::1"))
LOCAL_SECONDS = 0.2
REMOTE_SECONDS = 5.0


def target_of(server: str) -> str:
    """The address to connect to for `server`. `localhost` has an IPv4 and an IPv6 address, and gRPC reports the error
    of only one of them; this returns the first loopback address that accepts a connection, or `server` if none does."""
    host, _, port = server.rpartition(":")
    if host != "localhost" or not port.isdecimal():
        return server
    found = (target for target, address in LOOPBACKS if _listens(address, int(port)))
    target = next(found, None)
    return server if target is None else f"{target}:{port}"


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), LOCAL_SECONDS):
            return True
    except (OSError, OverflowError):
        return False


async def speaks_tls(server: str) -> bool:
    """Whether the server speaks TLS. Its certificate is not verified."""
    host, _, port = server.rpartition(":")
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(REMOTE_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=anybody)
    except (OSError, ValueError, OverflowError):  # TimeoutError and SSLError are OSErrors
        return False
    writer.close()
    return True
