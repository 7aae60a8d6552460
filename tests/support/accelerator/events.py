"""The operations that a host requests of an accelerator, with the requesting line of code."""

import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import transformers

Kind = Literal["launch", "exchange", "to device", "to host", "wait", "allocation"]

ROOT = Path(__file__).parents[3]
HERE = str(Path(__file__).parent)
NAMED = {str(Path(transformers.__file__).parent): "transformers"}
PASSING_ON = str(ROOT / "workers" / "host_copies.py")
"""Copies for others: those are the ones who ask."""
NAMED |= {str(ROOT / name): name for name in ("longleaf", "workers", "tests")}


class Event(NamedTuple):
    """One thing that was asked of the device."""

    kind: Kind
    name: str
    """The name of the operation or kernel; of a wait, its reason."""
    site: str
    """The innermost line of this project or of transformers that led to it, as `longleaf/attention/masks.py:80`."""
    layer: int | None
    """The attention layer between whose queries, keys and values and whose answer it was; None outside of attention."""
    num_bytes: int = 0
    """Of copies, exchanges and allocations."""


class Log:
    """Events in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._layer: int | None = None

    def add(self, kind: Kind, name: str, num_bytes: int = 0) -> None:
        self.events.append(Event(kind, name, site(), self._layer, num_bytes))

    def take(self) -> "Log":
        """Returns the events so far as a separate log, and clears this one."""
        taken = Log()
        taken.events, self.events = self.events, []
        return taken

    @contextmanager
    def within(self, layer: int) -> Generator[None, None, None]:
        """Attributes the events within the block to the attention of this layer."""
        self._layer = layer
        try:
            yield
        finally:
            self._layer = None

    def of(self, *kinds: Kind) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def by_site(self, *kinds: Kind) -> Counter[str]:
        """How often each line asked for such."""
        return Counter(event.site for event in self.of(*kinds))

    def per_layer(self, *kinds: Kind) -> Counter[int]:
        """The number of events of these kinds in the attention of each layer, the product's share of all launches."""
        return Counter(event.layer for event in self.of(*kinds) if event.layer is not None)

    def outside(self, *kinds: Kind) -> list[Event]:
        """The events outside of attention."""
        return [event for event in self.of(*kinds) if event.layer is None]

    def summary(self, kind: Kind) -> str:
        """The most frequent events by line and name, as readable text."""
        requested = Counter((event.site, event.name, event.layer is not None) for event in self.of(kind))
        lines = [
            f"{n:6} {name} at {line}{'' if ours else ' (outside)'}" for (line, name, ours), n in requested.most_common()
        ]
        return "\n".join(lines[:30])


def site() -> str:
    """The innermost line on the stack that is this project's or transformers'."""
    frame = sys._getframe(1)
    while frame is not None:
        if (name := name_of(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@lru_cache
def name_of(path: str) -> str | None:
    """The short name of a file; None for files that are not of interest."""
    if path.startswith((HERE, PASSING_ON)):
        return None
    return next((name + path[len(folder) :] for folder, name in NAMED.items() if path.startswith(folder + "/")), None)
