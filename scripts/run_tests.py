"""Runs pytest, and prints how long it took and how much processor time it used.

Processor time is also given in rounds of a calibration loop that runs meanwhile: machines differ, and so does one
machine from hour to hour, but the number of rounds is nearly the same.

    python scripts/run_tests.py [--budget FILE] [--limit MINUTES] [--] ARGUMENTS OF PYTEST

Processor time is that of all processes that the tests start, including those whose parents end before them. With
--budget, the exit code is 1 if the tests passed and used more rounds than the file allows. The file has one number, in
thousands. A run that exceeds --limit prints the stacks of pytest's processes, and ends: a test that waits in compiled
code cannot be interrupted by its own timeout.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
BETWEEN_ROUNDS_SECONDS = 2.0
ORPHANS_SECONDS = STACKS_SECONDS = 10.0
TOLERANCE = 0.15
"""Allowed excess over the budget, as a fraction."""


def calibration_round() -> float:
    """CPU seconds of one calibration round: dictionary, string and sort operations."""
    began = time.thread_time()
    words = [f"{number * 2654435761 % 1000003:x}" for number in range(12_000)]
    counts: dict[str, int] = {}
    for word in words:
        counts[word[:3]] = counts.get(word[:3], 0) + len(word)
    ordered = sorted(words, key=lambda word: (counts[word[:3]], word))
    assert len("".join(ordered)) == sum(map(len, words))
    return time.thread_time() - began


class Calibration(threading.Thread):
    """Repeats the calibration loop until it is stopped; a round takes about 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = threading.Event()
        self._rounds = [calibration_round() for _ in range(3)]

    def run(self) -> None:
        while not self._is_over.wait(BETWEEN_ROUNDS_SECONDS):
            self._rounds.append(calibration_round())

    def stop(self) -> float:
        """The median of the rounds, in seconds."""
        self._is_over.set()
        self.join()
        return statistics.median(self._rounds)


def abort(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest and its workers, which print their stacks, and kills the processes that remain."""
    print("error: the tests exceed the limit; the stacks of all threads follow", file=sys.stderr, flush=True)
    descendants = psutil.Process().children(recursive=True)
    for each in [*psutil.Process(process.pid).children(), process]:
        each.send_signal(signal.SIGABRT)  # pytest enables faulthandler
    psutil.wait_procs(descendants, STACKS_SECONDS)
    for each in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def run(command: list[str], limit_seconds: float) -> int:
    """Runs a command and waits for it and its orphaned descendants; returns the exit code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command as well
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    watchdog = threading.Timer(limit_seconds, abort, [process])
    watchdog.daemon = True
    watchdog.start()
    status = None
    while status is None:
        pid, ended = os.waitpid(-1, 0)
        status = ended if pid == process.pid else None
    process.returncode = os.waitstatus_to_exitcode(status)
    watchdog.cancel()
    deadline = time.monotonic() + ORPHANS_SECONDS
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
    except ChildProcessError:  # none is left
        pass
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs pytest and measures it.")
    parser.add_argument("--budget", type=Path, help="file with the thousands of rounds that the tests may take")
    parser.add_argument("--limit", type=float, default=50.0, metavar="MINUTES", help="after which the tests are ended")
    parser.add_argument("arguments", nargs="*", help="pytest arguments, after --")
    options = parser.parse_args()
    calibration, began = Calibration(), time.monotonic()
    calibration.start()
    code = run([sys.executable, "-m", "pytest", *options.arguments], 60 * options.limit)
    wall, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, round_seconds = used.ru_utime + used.ru_stime, calibration.stop()
    thousands = cpu / round_seconds / 1000
    calibrated = f"{thousands:.1f} thousand rounds of {1000 * round_seconds:.1f} ms"
    print(f"{wall:.0f} s of wall time, {cpu:.0f} s of processor time: {calibrated}")
    if options.budget is None:
        return code
    budget = float(options.budget.read_text())
    print(f"{thousands / budget:.0%} of the budget of {budget:g} thousand rounds")
    if code or thousands <= budget * (1 + TOLERANCE):
        return code
    print(
        f"error: the tests take more processor time than {options.budget} allows. Make them cheaper, or mark some as"
        " `extended` (CONTRIBUTING.md)",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
