"""Chat templates rendered apart. A template is a program of whoever made the checkpoint, and may never end.

Nothing within a process can end it for certain: one multiplication of numbers may take years, and lets no other thread
run. So it has a process of its own, which the system ends when its processor time or its memory is used up.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import datetime

from coordinator.text.template import Rendering, Shape
from longleaf.errors import ModelRefused, StartError
from longleaf.units import human_seconds

SECONDS = 5
"""Processor time that a template may take; honest ones take milliseconds."""


class Renderer:
    """Renders templates, one at a time; `stop` ends that from another thread. What a template is told of the time is
    always when this began, so that the prompts of one service begin alike, also after midnight."""

    def __init__(self, seconds: int = SECONDS, now: datetime | None = None) -> None:
        self._seconds = seconds
        self._now = now or datetime.now()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def render(self, source: str, special_tokens: dict[str, str], shapes: Sequence[Shape]) -> list[Rendering]:
        """As template.render_shapes, but with fewer renderings, at least one, when there was no time for the others.

        Raises ModelRefused when it ended in an unknown way before the first, and StartError when it was stopped.
        """
        given = {"source": source, "special_tokens": special_tokens, "shapes": shapes, "now": self._now.isoformat()}
        process = self._start()
        answer, _ = process.communicate(json.dumps(given))
        made = [_rendering(line) for line in answer.splitlines(keepends=True) if line.endswith("\n")]
        if made or not process.returncode:
            return made
        if process.returncode == -signal.SIGXCPU:
            return [Rendering(reason=f"takes more than {human_seconds(self._seconds)} of processor time")]
        raise self._failure(process.returncode)

    def _start(self) -> "subprocess.Popen[str]":
        # -P: a folder named `jinja2` where the command was typed must not shadow the library.
        command = [sys.executable, "-P", "-m", "coordinator.text.template", str(self._seconds)]
        with self._lock:
            if self._is_stopped:
                raise self._failure(0)
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            return self._process

    def _failure(self, code: int) -> StartError:
        if self._is_stopped:
            return StartError("the service was stopped while it loaded the chat template")
        return ModelRefused(f"the chat template cannot be rendered: its process ended with exit code {code}")

    def stop(self) -> None:
        """Ends the process if there is one, and lets none begin. Idempotent."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()


def _rendering(line: str) -> Rendering:
    parts, reason, message = json.loads(line)
    return Rendering(tuple(parts), reason, message)
