"""Hosts of a test, which are network namespaces of this machine."""

import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from bench.harness.hosts import Network, hosts, obstacle
from tests.support.tools import lacks


@contextmanager
def two_hosts(version: Literal[4, 6]) -> Iterator[Network]:
    """Two hosts that have only addresses of this version of IP. Their remaining processes are killed at the end."""
    if reason := obstacle():
        lacks(reason)
    with hosts(2) as network:
        if version == 6:
            network = _with_addresses(network, ("fd77::1", "fd77::2"))
        try:
            yield network
        finally:
            for namespace in network.namespaces:
                result = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
                for pid in map(int, result.stdout.split()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _with_addresses(network: Network, addresses: tuple[str, str]) -> Network:
    for namespace, old, new in zip(network.namespaces, network.addresses, addresses, strict=True):
        change = ["ip", "-n", namespace, "address"]
        subprocess.run([*change, "del", f"{old}/24", "dev", network.interface], check=True)
        # nodad: otherwise the address is of no use for a second or two
        subprocess.run([*change, "add", f"{new}/64", "dev", network.interface, "nodad"], check=True)
    return dataclasses.replace(network, addresses=addresses)
