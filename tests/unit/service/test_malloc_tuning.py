"""The memory of a document is returned to the system when its ingest ends."""

import subprocess
import sys

import pytest

MIB = 1 << 20
GROW = """
import sys, threading
from array import array
import psutil
from coordinator.malloc_tuning import return_large

if sys.argv[1] == "yes":
    return_large()
step, held = array("I", bytes(1 << 18)), []

def grow():
    array("I", bytes(24 << 20))  # as a long document that has ended before: it raises glibc's mmap threshold
    documents = [array("I") for _ in range(8)]
    for _ in range(40):
        for document in documents:
            document.extend(step)
            held.append(bytes(2000))

before = psutil.Process().memory_info().rss
for _ in range(2):
    thread = threading.Thread(target=grow)
    thread.start()
    thread.join()
print(psutil.Process().memory_info().rss - before)
"""


def bytes_left(wanted: str) -> int:
    """Bytes that a process keeps of 16 documents that have ended."""
    done = subprocess.run([sys.executable, "-c", GROW, wanted], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_of_documents_is_returned() -> None:
    assert bytes_left("yes") < 16 * MIB < bytes_left("no")
