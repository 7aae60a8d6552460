"""Entry point of the `longleaf` command. The import of longleaf.cli takes a noticeable part of a second."""

import os
import signal


def main() -> None:
    """Runs the command. An interrupt ends it without output, even during the imports."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # if the caller ignores interrupts, they stay ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the command reports connection errors itself
    from longleaf.cli import app

    signal.signal(signal.SIGINT, usual)
    app.main()
