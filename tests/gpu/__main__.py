"""Runs the checks on the GPU and prints the result of each; the exit status is 1 if one failed.

Each check runs in a separate process, because CUDA refuses all calls of a process after an invalid read of a kernel.
Usage:

    python -m tests.gpu                 all checks, several at a time
    python -m tests.gpu captured        those whose name contains this
"""

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from bench.gpu import ground

if TYPE_CHECKING:
    from tests.gpu.place import Place

JOBS = 10
"""Processes at a time. Each has kernels compiled, and takes some GiB on the GPU."""
DEADLINE = 600.0
"""Seconds after which a check has failed."""
Check = Callable[["Place"], None]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m tests.gpu"
    )
    parser.add_argument("only", nargs="?", default="", metavar="TEXT", help="checks whose name holds this")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time (default: %(default)s)")
    parser.add_argument("--here", action="store_true", help="one after the other, in this process")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if (status := ground.stand()) is not None:
        return status
    import torch

    from tests.gpu.checks import CHECKS

    exact = [check for check in CHECKS if options.only == name_of(check)]
    wanted = exact or [check for check in CHECKS if options.only in name_of(check)]
    if not wanted:
        sys.exit(f"no check's name holds {options.only!r}")
    if options.here:
        from tests.gpu.place import on_gpu

        place = on_gpu(ground.DEVICE)
        found = [passed(check, place) for check in wanted]
        return int(not all(found))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {ground.installed('triton')}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda check: passed_apart(name_of(check)), wanted))
    num_failed = found.count(False)
    print(f"{len(found) - num_failed} of {len(found)} checks passed or were left out, {num_failed} failed")
    return int(num_failed > 0)


def name_of(check: Check) -> str:
    return f"{check.__module__.rpartition('.')[2]}.{check.__name__}"


def passed(check: Check, place: "Place") -> bool:
    """Runs a check and prints its result. Returns whether it did not fail."""
    begin = time.monotonic()
    try:
        check(place)
    except ground.LeftOut as reason:
        print(f"left out  {name_of(check)}: {reason}", flush=True)
        return True
    except Exception:  # any error; the other checks still run
        print(f"FAILED    {name_of(check)}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"passed    {name_of(check)}  {time.monotonic() - begin:.1f} s", flush=True)
    return True


def passed_apart(name: str) -> bool:
    """Runs the checks of this name in a separate process and prints its output. Returns whether it succeeded."""
    command = [sys.executable, "-m", "tests.gpu", name, "--here"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        print(f"FAILED    {name}: no end after {DEADLINE:.0f} s", flush=True)
        return False
    if run.returncode:
        ended = "" if "FAILED" in run.stdout else f"FAILED    {name}: ended with {run.returncode}\n"
        print(f"{run.stdout}{ended}{run.stderr}", end="", flush=True)
    else:
        print(run.stdout, end="", flush=True)
    return not run.returncode


if __name__ == "__main__":
    sys.exit(main())
