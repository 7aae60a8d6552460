"""The restrictions of the extraction process."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from longleaf.documents.extraction_process import extract

ROOT = Path(__file__).parents[3]
PROGRAM = """
import fcntl, json, os, resource, socket, subprocess, sys
import threading
from longleaf.documents.confinement import confine
from longleaf.documents.limits import ExtractionLimits

attempts = {
    "open": lambda: open("/etc/passwd").close(),
    "home": lambda: os.listdir(os.path.expanduser("~")),
    "write": lambda: open("/tmp/longleaf-escape", "w").close(),
    "unlink": lambda: os.unlink("/tmp/longleaf-escape"),
    "tcp": lambda: socket.create_connection(("127.0.0.1", 9), 1),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "unix": lambda: socket.socketpair(),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "spawn": lambda: subprocess.run(["/bin/true"]),
    "thread": lambda: threading.Thread(target=print).start(),
    "kill": lambda: os.kill(os.getppid(), 0),
    "prlimit": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "fcntl": lambda: fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid()),
    "chdir": lambda: os.chdir("/tmp"),
    "memfd": lambda: os.memfd_create("x"),
    "pidfd": lambda: os.pidfd_open(os.getppid()),
    "memory": lambda: bytearray(1 << 29),
}
by = confine(ExtractionLimits(memory_bytes=1 << 28), 0)
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
        found[name] = "done"
    except BaseException as error:
        found[name] = type(error).__name__
print(json.dumps({"by": by, "found": found}), flush=True)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="needs seccomp of Linux"
)
def test_confined_process_reaches_no_file_no_network_and_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {"limits", "filter"} <= set(found["by"])
    assert found["found"].pop("memory") == "MemoryError"
    assert found["found"].pop("thread") in ("RuntimeError", "MemoryError")
    assert set(found["found"].values()) == {"PermissionError"}, found
    assert not os.path.exists("/tmp/longleaf-escape")


def test_process_has_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment, its arguments and its folder have no secrets of the parent."""
    monkeypatch.setenv("LONGLEAF_CREDENTIAL", "lk-secret")
    (tmp_path / "a.txt").write_text("x")
    seen = list[bytes]()

    def look(process: object) -> None:
        number = process._process.pid  # type: ignore[attr-defined]
        seen.append(Path(f"/proc/{number}/environ").read_bytes() + Path(f"/proc/{number}/cmdline").read_bytes())

    with (tmp_path / "a.txt").open("rb") as file:
        found = extract(file, "a.txt", on_start=look)
    assert [section.text for section in found.sections] == ["x"]
    assert b"secret" not in seen[0]
    assert "limits" in found.confined_by
