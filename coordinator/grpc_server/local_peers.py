"""Which callers are on the machine of the service."""

from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from longleaf.network_interfaces import interface_of

UNIX = "unix:"


def is_here(peer: str) -> bool:
    """Whether `peer`, as gRPC tells it (`ipv4:HOST:PORT`, `ipv6:%5BHOST%5D:PORT`), has an address of this machine: that
    of the loopback, or of one of its interfaces. Inside a container these are those of its network alone."""
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
