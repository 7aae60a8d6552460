"""Import of large packages by a rank."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Generator[None]:
    """Excludes objects that are imported in the body from garbage collection. Collections would take a fifth of the
    import time, and a later one would delay a step by a quarter of a second while it scans torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
