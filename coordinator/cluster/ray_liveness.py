"""Whether a node of a Ray cluster lives, by its own port: Ray itself may take a quarter of a minute to say that it does
not, and until then places actors there."""

import socket

ANSWER_SECONDS = 0.5
"""How long a node that lives may take to take a connection."""


def answers(host: str, port: int) -> bool:
    """Whether Ray's process on a node can be reached."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def has_ended(host: str, port: int) -> bool:
    """Whether its machine says that nobody listens there any more. One that says nothing may only be cut off."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
