"""Ranks on several hosts, which are network namespaces: they find the interface to each other without configuration."""

import functools
import os
from collections.abc import Iterator

import psutil
import pytest
import torch

from bench.harness.hosts import Network, enter
from longleaf.comm.process_group import open_store
from longleaf.config import network_environment
from longleaf.network_interfaces import interface_of
from tests.support.network.namespaces import two_hosts
from tests.support.processes import RankProcess, Ranks


@pytest.fixture(params=[4, 6])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with two_hosts(request.param) as network:
        yield network


def enter_namespace(namespaces: tuple[str, ...], rank: int) -> None:
    """Moves the rank to a separate host."""
    enter(namespaces[rank])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)


def gather(rank, owner):
    names = tuple(os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    listening = {one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    return owner.groups.world.all_gather(torch.tensor([rank])).flatten().tolist(), names, listening


def test_ranks_on_two_hosts_connect_without_configuration(network: Network) -> None:
    """The machine's host name cannot be resolved here; gloo by default relies on it."""
    store = network.run(0, functools.partial(open_store, network.addresses[0]))
    ranks = Ranks("ab", network.addresses)
    prepare = functools.partial(enter_namespace, network.namespaces)
    processes = [RankProcess(rank, ranks, store, gather, prepare, "forkserver", {}) for rank in range(2)]
    names = (network.interface, f"={network.interface}")
    assert [process.result() for process in processes] == [([0, 1], names, {own}) for own in network.addresses]
    assert [process.end() for process in processes] == [0, 0]


def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.1") is None, "documentation addresses belong to no host"
    assert interface_of("a-name") is None


def test_user_defined_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert network_environment(None) == {}
    assert network_environment("eth7") == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth7"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert network_environment("eth7") == {"GLOO_SOCKET_IFNAME": "mine", "NCCL_SOCKET_IFNAME": "=eth7"}
