"""The answers of torch.cuda for the simulated device, and the calls that it receives."""

from contextlib import AbstractContextManager
from unittest.mock import patch

import torch

from tests.support.accelerator.dispatch import is_there
from tests.support.accelerator.events import Log

FREE, TOTAL = 70 << 30, 80 << 30


class Driver:
    """Replaces torch.cuda while it is patched in. Calls with another device than the simulated one are refused."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.calls: list[tuple[str, str]] = []
        """The calls, and the device of each."""

    def patched(self) -> AbstractContextManager[object]:
        """Puts it in torch.cuda's place."""
        names = ("set_device", "mem_get_info", "synchronize")
        return patch.multiple(torch.cuda, Event=self.event, **{name: getattr(self, name) for name in names})

    def event(self) -> "Event":
        return Event(self._log)

    def set_device(self, device: object) -> None:
        self._note("set_device", device)

    def mem_get_info(self, device: object) -> tuple[int, int]:
        self._note("mem_get_info", device)
        return FREE, TOTAL

    def synchronize(self, device: object) -> None:
        self._note("synchronize", device)
        self._log.add("wait", "synchronize")

    def _note(self, name: str, device: object) -> None:
        assert is_there(device), f"{name} of {device}"
        self.calls.append((name, str(device)))


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._is_recorded = False

    def record(self) -> None:
        self._is_recorded = True

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._is_recorded:  # waiting for an event that was never recorded returns immediately
            self._log.add("wait", "event")
