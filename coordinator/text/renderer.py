"""Chat templates rendered apart. A template is a program of whoever made the checkpoint, and may never end.

Nothing within a process can end it for certain: one multiplication of numbers may take years, and lets no other thread
run. So it has a process of its own, which the system ends when its processor time or its memory is used up.
"""

import json
import signal
import subprocess
import sys
import threading
from typing import Any

from longleaf.errors import ModelRefused, StartError
from longleaf.units import human_seconds

SECONDS = 5
"""Processor time that a template may take; honest ones take milliseconds."""


class Renderer:
    """Renders one template; `stop` ends it from another thread."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def split(self, source: str, special_tokens: dict[str, str]) -> tuple[str, str]:
        """As template.split_template.

        Raises ModelRefused, also for a template that takes too much time or memory, and StartError when it was stopped.
        """
        request = json.dumps({"source": source, "special_tokens": special_tokens})
        process = self._start()
        answer, _ = process.communicate(request)
        if process.returncode:
            raise self._failure(process.returncode)
        found: dict[str, Any] = json.loads(answer)
        if "reason" in found:
            raise ModelRefused(found["reason"])
        return found["before"], found["after"]

    def _start(self) -> subprocess.Popen[str]:
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
        if code == -signal.SIGXCPU:
            return ModelRefused(f"the chat template takes more than {human_seconds(self._seconds)} of processor time")
        return ModelRefused(f"the chat template cannot be rendered: its process ended with exit code {code}")

    def stop(self) -> None:
        """Ends the process if there is one, and lets none begin. Idempotent."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()


def split_apart(source: str, special_tokens: dict[str, str]) -> tuple[str, str]:
    """As template.split_template, in a process of its own. Raises ModelRefused."""
    return Renderer().split(source, special_tokens)
