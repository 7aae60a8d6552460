"""A pseudo-terminal in which a command runs, with a reader that waits for output instead of sleeping."""

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Self

PATIENCE_SECONDS = 60.0
CTRL_C, CTRL_D, TAB, UP = "\x03", "\x04", "\t", "\x1b[A"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[78DM]|\r")


class PtyTerminal:
    """Runs a command in a pseudo-terminal and a new session; to be entered."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment}
        self._seen = ""
        self._end = 0

    def __enter__(self) -> Self:
        self._leader, follower = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *self._command],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=self._environment,
        )
        os.close(follower)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._leader)  # which hangs up the session
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def output(self) -> str:
        """All output so far, without escape sequences."""
        return _ESCAPES.sub("", self._seen)

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def expect(self, text: str) -> str:
        """Waits for `text` after the last expected one. Returns the output between both."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (place := self.output.find(text, self._end)) < 0:
            assert self._read(deadline), f"no {text!r} in {self.output[self._end :]!r}"
        between = self.output[self._end : place]
        self._end = place + len(text)
        return between

    def wait(self) -> int:
        """The exit code."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(PATIENCE_SECONDS)

    def _read(self, deadline: float) -> bool:
        """Whether there was output."""
        ready, _, _ = select.select([self._leader], [], [], max(0.0, deadline - time.monotonic()))
        try:
            found = os.read(self._leader, 1 << 16) if ready else b""
        except OSError:  # Linux reports the end of a terminal as EIO
            found = b""
        self._seen += found.decode(errors="replace")
        return bool(found)
