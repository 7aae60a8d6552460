"""Checks the prerequisites of a GPU run and reports missing ones in one line.

Imports nothing that may be missing, so that the report is always possible.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

Versions = Mapping[str, tuple[int, ...]]
"""Packages, and the version that each must have at least."""

NEEDED: Versions = {"torch": (2, 11), "triton": (3, 6)}
NEEDED_BY_RANKS: Versions = {
    "transformers": (5, 15),
    "safetensors": (),
    "tokenizers": (),
    "jinja2": (),
    "psutil": (),
    "numpy": (),
    "blake3": (),
}
"""Beside those, for all that runs a whole model or chooses tokens."""
PYTHON = (3, 11)
DEVICE = "cuda:0"
NO_GPU = "no GPU: nothing was run"
STAND_INS = Path(__file__).parent / "stand_ins"


class LeftOut(Exception):
    """Why a measurement or a check was not made."""


def missing() -> str:
    """The missing or outdated packages of an interpreter, in one line; empty if there are none."""
    found = [f"Python {'.'.join(map(str, PYTHON))}"] if sys.version_info < PYTHON else []
    found += lacking(NEEDED)
    return f"missing: {', '.join(found)}" if found else ""


def need(wanted: Versions) -> None:
    """Raises LeftOut, naming them, where some packages are missing or too old."""
    if found := lacking(wanted):
        raise LeftOut(f"needs {', '.join(found)}")


def lacking(wanted: Versions) -> list[str]:
    """The missing or outdated packages, with the required versions."""
    found: list[str] = []
    for name, least in wanted.items():
        have = installed(name)
        if have is None or numbers(have) < least:
            requested = f" >= {'.'.join(map(str, least))}" if least else ""
            found.append(f"{name}{requested}" + (f" (here: {have})" if have else ""))
    return found


def installed(name: str) -> str | None:
    """The version of a package; None if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: those of 2.11.0+cu130 are 2 and 11."""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def has_gpu() -> bool:
    """Whether torch is there and sees a GPU."""
    if installed("torch") is None:
        return False
    return bool(import_module("torch").cuda.is_available())


def stand() -> int | None:
    """Prepares the run on the GPU. None on success; else the exit status, after a line with the reason: 0 if there is
    no GPU, 1 if there is one and something else is missing."""
    if installed("torch") is not None and not has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 0
    if line := missing():
        print(line, file=sys.stderr)
        return 1
    stand_in()
    return None


def stand_in() -> None:
    """Lets Longleaf's kernels be imported without msgspec, which only messages need."""
    if find_spec("msgspec") is None and str(STAND_INS) not in sys.path:
        sys.path.append(str(STAND_INS))
