"""The rendezvous of ranks: the peers that can reach it, and the messages that they exchange there."""

import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed

from longleaf.comm import process_group
from longleaf.comm.process_group import TransportChoice, connect_store, open_store
from longleaf.comm.shared_memory import JoinMessage
from tests.support.processes import TIMEOUT, run_ranks


def listening() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    found = psutil.Process().net_connections()
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1")])
def test_store_is_reachable_only_at_its_host(host: str, other: str) -> None:
    store = open_store(host)
    assert [ip for ip, port in listening() if port == store.port] == [host]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, store.port), timeout=20)
    connect_store(host, store.port).set("key", b"value")
    assert store.get("key") == b"value"


def test_a_store_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 opens it before other ranks connect. Torch would try again for 13 seconds."""
    monkeypatch.setattr(torch.distributed, "TCPStore", None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(torch.distributed.DistNetworkError, match=r"127\.0\.0\.1 port \d+: .*refused"):
            connect_store("127.0.0.1", unused.getsockname()[1])


def forbid_pickles(rank: int) -> None:
    """From now on, torch raises on every conversion between bytes and objects."""

    def fail(*_: object) -> None:
        raise AssertionError("ranks exchange pickles")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        assert hasattr(torch.distributed.distributed_c10d, name)
        setattr(torch.distributed.distributed_c10d, name, fail)


def where_it_listens(rank, owner):
    return owner.groups.node.transport, {ip for ip, _ in listening()}


def test_ranks_of_one_machine_exchange_no_pickle_and_listen_only_on_the_loopback() -> None:
    assert run_ranks("aa", where_it_listens, forbid_pickles) == [("shared_memory", {"127.0.0.1"})] * 2


def exchange_words(rank, owner):
    return process_group._broadcast_choice(JoinMessage("/a/path", "why " * rank))


def test_every_rank_receives_the_messages_of_all() -> None:
    words = [JoinMessage("/a/path", "why " * rank) for rank in range(3)]
    assert run_ranks("abc", exchange_words) == [words] * 3


def limits(rank, owner):
    """How long operations in each group may take."""
    groups = [comm._group for comm in (owner.groups.world, owner.groups.node, owner.groups.rail)]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_node_and_rail_groups_have_the_same_timeout_as_others() -> None:
    """By default torch gives later groups half an hour."""
    assert run_ranks("aabb", limits, carrier=TransportChoice("gloo")) == [[timedelta(seconds=TIMEOUT)] * 3] * 4
