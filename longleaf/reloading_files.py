"""Files that are read again when their content changes."""

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
"""How often files are looked at, at most: what changes is known within this."""
log = logging.getLogger("longleaf.reloads")
"""No part of `coordinator.auth`, which is for lines about calls."""


class ReloadingFiles(Generic[Parsed]):
    """What `parse` made of the files together, whose names in errors are the keys of `paths`. Files that are broken
    later change nothing: that is logged once and counted. By content, not by time: a Secret of Kubernetes is another
    folder behind the same link. Any thread may ask."""

    def __init__(
        self,
        paths: Mapping[str, str],
        parse: Callable[..., Parsed],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parse` gets the bytes of each file, in order. Raises InvalidArgument."""
        self._paths = {field: Path(path) for field, path in paths.items()}
        self._parse, self._clock = parse, clock
        self._lock = threading.Lock()
        datas = self._read()
        self._value = parse(*datas)
        self._digest: tuple[bytes, ...] = _digest_of(datas)
        self._looked = clock()
        self._trouble = ""
        self.num_failed_reloads = 0

    @property
    def value(self) -> Parsed:
        """Of the newest contents that could be used."""
        with self._lock:
            if self._clock() - self._looked >= LOOK_SECONDS:
                self._looked = self._clock()
                self._look()
            return self._value

    @property
    def is_unusable(self) -> bool:
        """What the files say now cannot be used."""
        _ = self.value  # looks, if that is due
        return bool(self._trouble)

    def _look(self) -> None:
        try:
            datas = self._read()
            digest = _digest_of(datas)
            if is_new := digest != self._digest:
                self._value, self._digest = self._parse(*datas), digest
        except InvalidArgument as error:
            self._note(str(error))
        except Exception as error:  # its message might quote the file
            self._note(f"{self._names} cannot be used: {type(error).__name__}")
        else:
            if self._trouble:  # as loud as what it ends
                log.warning("%s can be used again, and is", self._names)
            elif is_new:
                log.info("read %s again", self._names)
            self._trouble = ""

    def _note(self, trouble: str) -> None:
        """What keeps the newest contents from being used; told once."""
        if trouble != self._trouble:
            self._trouble = trouble
            self.num_failed_reloads += 1
            log.warning("%s; what was there before goes on", trouble)

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._paths.values()))

    def _read(self) -> list[bytes]:
        """Raises InvalidArgument."""
        return [read_small(field, path) for field, path in self._paths.items()]


def _digest_of(datas: list[bytes]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(data).digest() for data in datas)
