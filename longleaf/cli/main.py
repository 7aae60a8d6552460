"""The `longleaf` command from its first moment on; all else is in longleaf.cli, which takes a while to import."""

import os
import signal


def main() -> None:
    """Runs the command. An interrupt ends it without a word, also while it is being imported."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else interrupts are ignored, and stay so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors of connections are told once, by the command
    from longleaf.cli import app

    signal.signal(signal.SIGINT, usual)
    app.main()
