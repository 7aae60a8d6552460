"""Reads lines from a terminal, with editing, completion and a history file.

Python's readline is enough and costs no dependency: prompt_toolkit would take 4 MB of the client's installation and
0.2 s of every start.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_HISTORY = 1000
"""Lines that the history file keeps."""
CONTINUED = "\\"
"""Last character of a line that the next one continues."""


def default_history() -> Path:
    """The history file of `longleaf chat`."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "longleaf" / "chat_history"


class LineEditor:
    """Reads messages, which may have several lines. Without readline, or where the output is no terminal, lines have
    neither editing nor a history."""

    def __init__(self, history: Path | None, complete: Callable[[str], Sequence[str]]) -> None:
        """`complete` returns all completions of the start of a line, as whole lines."""
        self._complete = complete
        self._history = history
        self._matches = list[str]()
        self._readline = _import_readline() if sys.stdout.isatty() else None
        if self._readline is not None:
            self._set_up(self._readline)

    def _set_up(self, readline: Any) -> None:
        readline.set_completer_delims("")
        readline.set_completer(self._next_match)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        readline.set_auto_history(False)
        readline.set_history_length(MAX_HISTORY)
        if self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_RDWR | os.O_CREAT, 0o600))  # messages may be confidential
            readline.read_history_file(self._history)
            readline.write_history_file(self._history)  # which drops the oldest lines
        except OSError as error:
            print(f"note: no history: {self._history}: {error.strerror}", file=sys.stderr)
            self._history = None

    def read(self, prompt: str, continuation: str) -> str:
        """The next message. Raises EOFError at the end of the input, and KeyboardInterrupt."""
        lines = [input(prompt)]
        while lines[-1].endswith(CONTINUED):
            lines[-1] = lines[-1].removesuffix(CONTINUED)
            lines.append(input(continuation))
        message = "\n".join(lines)
        self._remember(" ".join(message.splitlines()))
        return message

    def _remember(self, line: str) -> None:
        readline = self._readline
        if readline is None or not line.strip():
            return
        last = readline.get_current_history_length()
        if last and readline.get_history_item(last) == line:
            return
        readline.add_history(line)
        if self._history is not None:
            with suppress(OSError):  # a full disk must not end a conversation
                # at once: a closed terminal ends the process without cleanup
                if hasattr(readline, "append_history_file"):
                    readline.append_history_file(1, self._history)
                else:
                    readline.write_history_file(self._history)

    def _next_match(self, line: str, index: int) -> str | None:
        if index == 0:
            self._matches = list(self._complete(line))
        return self._matches[index] if index < len(self._matches) else None


def _import_readline() -> Any:
    try:
        import readline
    except ImportError:
        return None
    return readline
