"""A file that is read again when its content changes."""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from longleaf.errors import InvalidArgument

Parsed = TypeVar("Parsed")
LOOK_SECONDS = 1.0
"""How often a file is looked at, at most: what changes is known within this."""
MAX_BYTES = 16 << 20
log = logging.getLogger(__name__)


class WatchedFile(Generic[Parsed]):
    """What `parse` made of a file, named `field` in errors. A file that is broken later changes nothing: it is logged
    once and counted. By content, not by time: a Secret of Kubernetes is another folder behind the same link."""

    def __init__(
        self,
        field: str,
        path: str,
        parse: Callable[[bytes], Parsed],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidArgument."""
        self._field, self._path, self._parse, self._clock = field, Path(path), parse, clock
        data = self._read()
        self._value = parse(data)
        self._digest: bytes = hashlib.sha256(data).digest()
        self._looked = clock()
        self._trouble = ""
        self.num_failed_reloads = 0

    @property
    def value(self) -> Parsed:
        """Of the newest content that could be used."""
        if self._clock() - self._looked >= LOOK_SECONDS:
            self._looked = self._clock()
            self._look()
        return self._value

    def _look(self) -> None:
        try:
            data = self._read()
            digest = hashlib.sha256(data).digest()
            if digest == self._digest:
                self._trouble = ""
                return
            self._value, self._digest, self._trouble = self._parse(data), digest, ""
        except InvalidArgument as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self.num_failed_reloads += 1
                log.warning("%s; what it said before goes on", error)
            return
        log.info("read %s again", self._path)

    def _read(self) -> bytes:
        """Raises InvalidArgument."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise InvalidArgument(self._field, f"{self._path}: {error.strerror}") from None
        if len(data) > MAX_BYTES:
            raise InvalidArgument(self._field, f"{self._path} has more than {MAX_BYTES:,} bytes")
        return data
