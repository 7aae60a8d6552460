"""Files that are reloaded when their contents change."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from longleaf.errors import InvalidArgument
from longleaf.read_limited import read_small

Parsed = TypeVar("Parsed")
LOOK_SECONDS = 1.0
"""Minimum interval in seconds between two checks of the files."""
log = logging.getLogger("longleaf.reloads")
"""Not a child of `coordinator.auth`, whose records are about calls."""


class ReloadingFiles(Generic[Parsed]):
    """The parsed contents of several files. In errors, files are named by the keys of `paths`. If changed files are
    invalid, the previous contents remain in use, and the failure is logged once and counted. Changes are detected by
    content, not by modification time, because Kubernetes updates a Secret by switching a link. Thread-safe."""

    def __init__(
        self,
        paths: Mapping[str, str],
        parse: Callable[..., Parsed],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parse` is called with the bytes of each file, in order. Raises InvalidArgument."""
        self._paths = {field: Path(path) for field, path in paths.items()}
        self._parse, self._clock = parse, clock
        self._lock = threading.Lock()
        datas = self._read()
        self._value = parse(*datas)
        self._digest: tuple[bytes, ...] = _digest_of(datas)
        self._looked = clock()
        self._error = ""
        self.num_failed_reloads = 0

    @property
    def value(self) -> Parsed:
        """Result of parsing the newest valid contents."""
        with self._lock:
            if self._clock() - self._looked >= LOOK_SECONDS:
                self._looked = self._clock()
                self._look()
            return self._value

    @property
    def is_unusable(self) -> bool:
        """Whether the current contents of the files are invalid."""
        _ = self.value  # checks the files, if due
        return bool(self._error)

    def _look(self) -> None:
        try:
            datas = self._read()
            digest = _digest_of(datas)
            if is_new := digest != self._digest:
                self._value, self._digest = self._parse(*datas), digest
        except InvalidArgument as error:
            self._note(str(error))
        except Exception as error:  # without its message, which might quote the file
            self._note(f"{self._names} cannot be used: {type(error).__name__}")
        else:
            if self._error:  # logged at the level of the warning that it resolves
                log.warning("loaded %s after an earlier error", self._names)
            elif is_new:
                log.info("reloaded %s", self._names)
            self._error = ""

    def _note(self, error: str) -> None:
        """Logs once why the newest contents are not used."""
        if error != self._error:
            self._error = error
            self.num_failed_reloads += 1
            log.warning("%s; the previous content stays in use", error)

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._paths.values()))

    def _read(self) -> list[bytes]:
        """Raises InvalidArgument."""
        return [read_small(field, path) for field, path in self._paths.items()]


def _digest_of(datas: list[bytes]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(data).digest() for data in datas)
