"""Hosts as Linux network namespaces of this machine, joined through a bridge; `tc tbf` limits their rates.

Two tiers: ranks of one host communicate over its loopback, ranks of different hosts over a pair of virtual cables. No
other process uses these interfaces, so their counters count the ranks' traffic. Needs root, `ip` and `tc`.

Limits: all hosts share the processors, and a cable adds no delay beyond that of its rate.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from bench.harness.arguments import log

T = TypeVar("T")
FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000
BURST_SECONDS = 100e-6
"""The burst size, in seconds at the full rate: large enough that a late timer loses no rate, and small enough that
messages of a few kilobytes are still limited."""
LARGEST_PACKET, SMALLEST_BURST = 65536, 20000
JUMBO_FRAME = "9000"
QUEUE_BYTES = 256 << 20
"""A queue never overflows: a lost packet would cost TCP's shortest timeout, 200 ms, which no cluster's fabric does."""


@dataclass(frozen=True, slots=True)
class Network:
    """Where ranks run. `namespaces` are the hosts; none: the ranks share this machine's own loopback."""

    name: str
    interface: str
    """By which the ranks find each other."""
    namespaces: tuple[str, ...]
    inside_gbit: float
    """Gbit/s of each host's loopback, shared by its ranks; 0 means no limit."""
    between_gbit: float
    """Gbit/s of each host's link, in each direction; 0 means no limit."""

    addresses: tuple[str, ...] = ()
    """Addresses of the hosts on their links; empty without links."""

    def run(self, host: int, call: Callable[[], T]) -> T:
        """Runs `call` in a new thread on a host and returns its result. Sockets that it opens stay on that host."""

        def enter_and_call() -> T:
            enter(self.namespaces[host])
            return call()

        with ThreadPoolExecutor(1) as executor:
            return executor.submit(enter_and_call).result()


LOOPBACK, TWO_TIER = "loopback", "two-tier"
OWN = Network(LOOPBACK, "lo", (), 0, 0)
"""Without namespaces: the counts include other traffic on the loopback."""


def rate(text: str) -> float:
    """A rate in Gbit/s from the command line. Raises ValueError below 0.001, tbf's unit, but for 0, no limit."""
    gbit = float(text)
    if not (gbit == 0 or 0.001 <= gbit < float("inf")):
        raise ValueError(f"a rate is 0 (no limit) or at least 0.001 Gbit/s, not {text}")
    return gbit


def one_host() -> AbstractContextManager[Network]:
    """A separate host without limits, or this machine's loopback if namespaces are not available, which is reported."""
    reason = obstacle()
    if reason is None:
        return hosts(1)
    log(f"{reason}; so bytes are counted on the machine's loopback, including other traffic")
    return nullcontext(OWN)


def obstacle() -> str | None:
    """Why there can be no namespaces here, in one line; None where there can."""
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"network namespaces need the commands ip and tc; missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        _run("ip", "netns", "add", name := f"longleaf-{os.getpid()}-try")
        _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"this machine grants no network namespaces: {error.stderr.strip()}"
    return None


@contextmanager
def hosts(count: int, *, inside_gbit: float = 0, between_gbit: float = 0) -> Iterator[Network]:
    """Creates `count` hosts and removes them at the end of the block, also after an error. Processes inside must have
    ended before.

    Raises subprocess.CalledProcessError where `obstacle` gives a reason.
    """
    prefix = f"longleaf-{os.getpid()}-{token_hex(2)}"  # a process may have several networks
    names = tuple(f"{prefix}-{i}" for i in range(count))
    addresses = tuple(f"10.77.0.{i + 1}" for i in range(count))
    with ExitStack() as stack:
        for name in names:
            _add(stack, name)
            _limit(name, "lo", inside_gbit)
        if count == 1:
            yield Network(LOOPBACK, "lo", names, inside_gbit, 0)
            return
        switch = f"{prefix}-switch"
        _add(stack, switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for i, name in enumerate(names):
            _join(name, switch, f"port{i}", addresses[i], between_gbit)
        yield Network(TWO_TIER, "cable", names, inside_gbit, between_gbit, addresses)


def enter(namespace: str) -> None:
    """Moves this thread, and those that it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (FOLDER / namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def burst_bytes(gbit: float) -> int:
    """Bytes that may pass at once at a rate in Gbit/s."""
    return max(int(gbit * 1e9 / 8 * BURST_SECONDS), SMALLEST_BURST)


def _add(stack: ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "del", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _join(host: str, switch: str, port: str, address: str, gbit: float) -> None:
    """Connects a host to a port of the switch. Both ends limit the rate of the data that they send."""
    ends = ("type", "veth", "peer", "name", port, "mtu", JUMBO_FRAME, "netns", switch)
    _run("ip", "-n", host, "link", "add", "cable", "mtu", JUMBO_FRAME, *ends)
    _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "cable")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", host, "link", "set", "cable", "up")
    _limit(host, "cable", gbit)
    _limit(switch, port, gbit)


def _limit(namespace: str, interface: str, gbit: float) -> None:
    """A packet larger than the burst would never pass, so the interface makes none; a loopback's are 64 KiB."""
    if gbit == 0:
        return
    burst = burst_bytes(gbit)
    sizes = ("mtu", JUMBO_FRAME, "gso_max_size", str(min(burst, LARGEST_PACKET)))
    _run("ip", "-n", namespace, "link", "set", interface, *sizes)
    limits = ("rate", f"{round(gbit * 1000)}mbit", "burst", str(burst), "limit", str(QUEUE_BYTES))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limits)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
