"""Replacement of this process by another program."""

import os
import signal


def become(command: list[str]) -> None:
    """Replaces this process by another program. SIGINT stays blocked until that program unblocks it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(command[0], command)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
