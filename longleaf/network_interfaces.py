"""The network interfaces of this machine."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil


def interface_of(host: str) -> str | None:
    """The interface with this IP address, or the loopback interface for any loopback address; None if no interface has
    it."""
    try:
        wanted = ip_address(host)
    except ValueError:  # a host name
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for owned in filter(None, map(_parse, (one.address for one in addresses))):
            if owned == wanted or (owned.is_loopback and wanted.is_loopback):
                return name
    return None


def _parse(address: str) -> IPv4Address | IPv6Address | None:
    """An address in the system's notation, possibly with a scope; None for other address families."""
    try:
        return ip_address(address.partition("%")[0])
    except ValueError:
        return None
