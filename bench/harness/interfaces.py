"""Bytes that left through the network interfaces of this process's namespace, as the kernel counts them.

They hold the headers and acknowledgements of TCP: what crosses the wire, not only what was asked to.
"""

from pathlib import Path

TABLE = Path("/proc/self/net/dev")
SENT_COLUMN = 8
"""Of the columns after an interface's name, the first of those that count what was sent."""


def sent_bytes() -> dict[str, int]:
    """By interface, since it came into being."""
    return parse(TABLE.read_text())


def parse(table: str) -> dict[str, int]:
    """Two lines of heading, then a line per interface: its name, a colon, eight columns received and eight sent."""
    lines = (line.partition(":") for line in table.splitlines()[2:])
    return {name.strip(): int(columns.split()[SENT_COLUMN]) for name, _, columns in lines}
