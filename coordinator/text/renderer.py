"""Chat templates rendered in separate processes, which are killed when they take too long.

A template is a program that comes with a checkpoint, and may never end. It cannot be stopped reliably within a process:
one multiplication may take years and blocks all other threads. The system ends the process when its processor time or
memory is used up. This process ends it when it does not answer for another reason, because it was stopped or the
machine is overloaded. The next rendering starts a new process.
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
from longleaf.formatting import human_seconds

SECONDS = 5
"""Processor time limit of a request; templates normally take milliseconds."""
PATIENCE = 60.0
"""Seconds after which a process that has not answered is ended."""


class TemplateRenderer(Protocol):
    """Renders chat templates; see template.DirectRenderer for the methods."""

    def literals(self, source: str) -> list[str]: ...

    def render(self, source: str, variables: dict[str, Any], conversations: Sequence[Messages]) -> list[Rendering]: ...


class Renderer:
    """Renders templates in one process per concurrently calling thread; `stop` may be called from another thread.
    Templates see the start time of this object as the current time, so that prompts of a service share their
    beginning, even after midnight."""

    def __init__(self, seconds: int = SECONDS, now: datetime | None = None, patience: float = PATIENCE) -> None:
        self._seconds = seconds
        self._now = now or datetime.now()
        self._patience = patience
        self._lock = threading.Lock()
        """Protects `_idle`, `_busy` and `_is_stopped`."""
        self._idle: list[subprocess.Popen[str]] = []
        self._busy: list[subprocess.Popen[str]] = []
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
            return [Rendering(reason="needs too much memory")] * len(conversations)
        if isinstance(found, str):
            return [Rendering(reason=found)] * len(conversations)
        return [Rendering(*each) for each in found]

    def _ask(self, request: dict[str, Any]) -> Any:
        """The answer; a reason if time was exceeded, None if memory was exceeded."""
        line = json.dumps(request | {"now": self._now.isoformat()}) + "\n"
        process = self._take()
        assert process.stdin is not None and process.stdout is not None
        answer, expired = "", threading.Event()
        impatient = threading.Timer(self._patience, self._expire, (process, expired))
        impatient.daemon = True
        try:
            impatient.start()
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            impatient.cancel()
            has_answered = answer.endswith("\n")
            self._give_back(process, has_answered and not expired.is_set())
        if has_answered:
            return json.loads(answer)
        return self._end(process, has_expired=expired.is_set())

    def _expire(self, process: "subprocess.Popen[str]", expired: threading.Event) -> None:
        with self._lock:
            if process in self._busy:
                expired.set()
                process.kill()

    def _take(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._is_stopped:
                raise self._failure(0)
            self._idle = [process for process in self._idle if process.poll() is None]
            process = self._idle.pop() if self._idle else self._begin()
            self._busy.append(process)
            return process

    def _give_back(self, process: "subprocess.Popen[str]", is_alive: bool) -> None:
        with self._lock:
            self._busy.remove(process)
            if is_alive:
                self._idle.append(process)

    def _begin(self) -> "subprocess.Popen[str]":
        # -P: a folder named `jinja2` in the working directory must not shadow the library.
        command = [sys.executable, "-P", "-m", "coordinator.text.template", str(self._seconds)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, encoding="utf-8")

    def _end(self, process: "subprocess.Popen[str]", *, has_expired: bool) -> str:
        """The reason why a process has not answered."""
        process.kill()
        code = process.wait()
        if has_expired:
            return f"did not finish within {human_seconds(self._patience)}"
        if code == -signal.SIGXCPU:
            return f"did not finish within {human_seconds(self._seconds)} of processor time"
        raise self._failure(code)

    def _failure(self, code: int) -> StartError:
        if self._is_stopped:
            return StartError("the service was stopped while the chat template was rendered")
        return ModelRefused(f"cannot render the chat template: its process exited with code {code}")

    def stop(self) -> None:
        """Ends the processes and prevents new ones. Idempotent."""
        with self._lock:
            self._is_stopped = True
            for process in [*self._idle, *self._busy]:
                process.kill()
                process.wait()
