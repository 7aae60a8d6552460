"""What must be there before anything runs on a GPU, said in one line where it is not.

Imports nothing that may be missing, so that it can say so.
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
    """What of an interpreter's packages is missing or too old, in one line; empty if all is there."""
    found = [f"Python {'.'.join(map(str, PYTHON))}"] if sys.version_info < PYTHON else []
    found += lacking(NEEDED)
    return f"missing: {', '.join(found)}" if found else ""


def need(wanted: Versions) -> None:
    """Raises LeftOut, naming them, where some packages are missing or too old."""
    if found := lacking(wanted):
        raise LeftOut(f"needs {', '.join(found)}")


def lacking(wanted: Versions) -> list[str]:
    """Which of some packages are missing or too old, with what is asked of them."""
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
    """Gets ready to run on the GPU. None if it can go on; else the exit status, after a line that says why: 0 where
    there is only no GPU, 1 where there is one and something else is missing."""
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
