"""Programs that tests use where they are there."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def tool(name: str) -> str:
    """The program's path, beside Python or wherever the shell finds it. A test that lacks it is skipped; it fails where
    REQUIRE_TOOLS is set, so that a machine that has all of them can prove so."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or lacks(f"{name} is not installed")


def lacks(reason: str) -> NoReturn:
    if os.environ.get("REQUIRE_TOOLS"):
        pytest.fail(f"REQUIRE_TOOLS is set, and {reason}")
    pytest.skip(reason)
