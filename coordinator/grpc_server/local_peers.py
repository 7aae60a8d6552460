"""Detects callers on the same machine."""

from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from longleaf.network_interfaces import interface_of

UNIX = "unix:"


def is_here(peer: str) -> bool:
    """Whether the address of `peer`, in gRPC's notation (`ipv4:HOST:PORT`, `ipv6:%5BHOST%5D:PORT`), belongs to this
    machine: a Unix socket, loopback, or the address of an interface. In a container, only the interfaces of the
    container count."""
    if peer.startswith(UNIX):
        return True
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or interface_of(str(address)) is not None
