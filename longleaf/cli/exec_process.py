"""A command that goes on as another program."""

import os
import signal


def become(command: list[str]) -> None:
    """Goes on as another program, which lets an interrupt in once it is ready for one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(command[0], command)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
