"""Writes requirements.lock: the versions that .venv holds, without torch, its GPU libraries and the project itself."""

import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
HEAD = "# Exact versions of everything but torch, used as a pip constraint file. Renew with `make lock`.\n"
MACHINE_DEPENDENT = ("torch==", "nvidia-", "cuda-", "triton==")


def main() -> None:
    freeze = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    lines = subprocess.run(
        freeze, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stdout.splitlines()
    retained = [line for line in lines if "==" in line and not line.startswith(MACHINE_DEPENDENT)]
    LOCK.write_text(HEAD + "\n".join(retained) + "\n")
    print(f"{LOCK.name}: {len(retained)} packages")


if __name__ == "__main__":
    main()
