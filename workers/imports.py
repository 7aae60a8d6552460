"""How a rank imports what is large."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def for_good() -> Generator[None]:
    """What is imported in here stays until the process ends, and nobody looks for garbage among it: not while it is
    imported, a fifth of whose time that takes, nor later, when a look through torch and transformers would make a step
    wait for a quarter of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
