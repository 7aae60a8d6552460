"""The network interfaces of this machine."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil


def interface_of(host: str) -> str | None:
    """The interface that owns an IP address, or any address of the loopback; None when there is none here."""
    try:
        wanted = ip_address(host)
    except ValueError:  # a name
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for owned in filter(None, map(_parse, (one.address for one in addresses))):
            if owned == wanted or (owned.is_loopback and wanted.is_loopback):
                return name
    return None


def _parse(address: str) -> IPv4Address | IPv6Address | None:
    """An address as the system tells it, perhaps with its interface behind it; None for one of another kind."""
    try:
        return ip_address(address.partition("%")[0])
    except ValueError:
        return None
