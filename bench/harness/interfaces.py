"""Bytes that left through the network interfaces of this process's namespace, as the kernel counts them.

They include the headers and acknowledgements of TCP: all bytes on the wire.
"""

from pathlib import Path

TABLE = Path("/proc/self/net/dev")
SENT_COLUMN = 8
"""Index of the first transmit column among the columns after an interface's name."""


def sent_bytes() -> dict[str, int]:
    """By interface, since it came into being."""
    return parse(TABLE.read_text())


def parse(table: str) -> dict[str, int]:
    """Two lines of heading, then a line per interface: its name, a colon, eight columns received and eight sent."""
    lines = (line.partition(":") for line in table.splitlines()[2:])
    return {name.strip(): int(columns.split()[SENT_COLUMN]) for name, _, columns in lines}
