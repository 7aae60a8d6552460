"""Chat templates rendered in a process of its own, which is ended when it takes too long.

A template is a program that comes with a checkpoint, and may never end. Nothing within a process can end it for
certain: one multiplication of numbers may take years, and lets no other thread run. The system ends the process when
its processor time or its memory is used up; the next rendering starts another.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol, cast

from coordinator.text.template import Messages, Rendering
from longleaf.errors import ModelRefused, StartError
from longleaf.units import human_seconds

SECONDS = 5
"""Processor time that a request may take; honest templates take milliseconds."""


class TemplateRenderer(Protocol):
    """Renders chat templates; see template.DirectRenderer for the methods."""

    def literals(self, source: str) -> list[str]: ...

    def render(self, source: str, variables: dict[str, Any], conversations: Sequence[Messages]) -> list[Rendering]: ...


class Renderer:
    """Renders templates, one request at a time; `stop` ends that from another thread. The time that templates are
    given is always the one when this began, so that the prompts of one service begin alike, also after midnight."""

    def __init__(self, seconds: int = SECONDS, now: datetime | None = None) -> None:
        self._seconds = seconds
        self._now = now or datetime.now()
        self._requests = threading.Lock()
        self._lock = threading.Lock()
        """Of `_process` and `_is_stopped`."""
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def literals(self, source: str) -> list[str]:
        """As DirectRenderer.literals. Raises as `render`; none if there was not enough time or memory."""
        found = self._ask({"source": source, "variables": {}, "conversations": None})
        return cast(list[str], found) if isinstance(found, list) else []

    def render(self, source: str, variables: dict[str, Any], conversations: Sequence[Messages]) -> list[Rendering]:
        """As DirectRenderer.render. A conversation that takes too much time or memory has that as its reason, and so
        have the others of the request. Takes up to SECONDS.

        Raises ModelRefused when the process ended in an unknown way, and StartError when it was stopped.
        """
        found = self._ask({"source": source, "variables": variables, "conversations": list(conversations)})
        if found is None:
            return [Rendering(reason="takes too much memory")] * len(conversations)
        if isinstance(found, str):
            return [Rendering(reason=found)] * len(conversations)
        return [Rendering(*each) for each in found]

    def _ask(self, request: dict[str, Any]) -> Any:
        """The answer; a text if there was not enough time, None if there was not enough memory."""
        line = json.dumps(request | {"now": self._now.isoformat()}) + "\n"
        with self._requests:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if answer.endswith("\n"):
                return json.loads(answer)
            return self._end(process)

    def _running(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._is_stopped:
                raise self._failure(0)
            if self._process is not None and self._process.poll() is None:
                return self._process
            # -P: a folder named `jinja2` where the command was typed must not shadow the library.
            command = [sys.executable, "-P", "-m", "coordinator.text.template", str(self._seconds)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
            )
            return self._process

    def _end(self, process: "subprocess.Popen[str]") -> str:
        """Why a process has not answered."""
        process.kill()
        code = process.wait()
        if code == -signal.SIGXCPU:
            return f"takes more than {human_seconds(self._seconds)} of processor time"
        raise self._failure(code)

    def _failure(self, code: int) -> StartError:
        if self._is_stopped:
            return StartError("the service was stopped while the chat template was rendered")
        return ModelRefused(f"the chat template cannot be rendered: its process ended with exit code {code}")

    def stop(self) -> None:
        """Ends the process if there is one, and lets none begin. Idempotent."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()
