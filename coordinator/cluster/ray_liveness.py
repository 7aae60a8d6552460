"""Checks whether a node of a Ray cluster is alive by connecting to its port. Ray needs up to 15 seconds to detect a
dead node and places actors there until then."""

import socket

ANSWER_SECONDS = 0.5
"""Seconds within which a live node accepts a connection."""


def answers(host: str, port: int) -> bool:
    """Whether Ray's process on a node can be reached."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def has_ended(host: str, port: int) -> bool:
    """Whether the machine refuses the connection. A machine that does not respond may only be disconnected."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
