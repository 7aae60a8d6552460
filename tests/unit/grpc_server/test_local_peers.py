"""Detection of callers on the machine of the service."""

import psutil
import pytest

from coordinator.grpc_server.local_peers import is_here


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:127.0.0.1:40000",
        "ipv4:127.8.8.8:40000",
        "ipv6:[::1]:40000",
        "ipv6:%5B::1%5D:40000",
        "ipv6:%5B::ffff:127.0.0.1%5D:40000",
        "unix:",
        "unix:/run/longleaf",
    ],
)
def test_loopback_is_local(peer: str) -> None:
    assert is_here(peer)


def test_addresses_of_this_machine_are_local() -> None:
    own = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family.name == "AF_INET"]
    assert own
    assert all(is_here(f"ipv4:{address}:1") for address in own)


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:192.0.2.1:40000",
        "ipv6:%5B2001:db8::1%5D:40000",
        "ipv6:%5Bfe80::1%25eth0%5D:40000",
        "ipv6:%5B::ffff:192.0.2.1%5D:40000",
        "ipv4:localhost:1",
        "ipv4:127.0.0.1.example:1",
        "",
    ],
)
def test_other_addresses_are_not_local(peer: str) -> None:
    assert not is_here(peer)
