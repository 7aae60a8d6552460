"""Runs the checks on the GPU and says of each how it went; the exit status is 1 if one failed."""

import sys
import time
import traceback
from collections.abc import Callable

from bench.gpu import ground


def main() -> int:
    if (status := ground.stand()) is not None:
        return status
    import torch

    from tests.gpu.checks import CHECKS
    from tests.gpu.place import on_gpu

    place = on_gpu(ground.DEVICE)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {ground.installed('triton')}", flush=True)
    num_failed = sum(not passed(check, lambda check=check: check(place)) for check in CHECKS)
    print(f"{len(CHECKS) - num_failed} of {len(CHECKS)} checks passed or were left out, {num_failed} failed")
    return int(num_failed > 0)


def passed(check: Callable[..., None], run: Callable[[], None]) -> bool:
    """Whether a check did not fail; says how it went."""
    name, begin = f"{check.__module__.rpartition('.')[2]}.{check.__name__}", time.monotonic()
    try:
        run()
    except ground.LeftOut as reason:
        print(f"left out  {name}: {reason}", flush=True)
        return True
    except Exception:  # whatever it is, the others shall run
        print(f"FAILED    {name}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"passed    {name}  {time.monotonic() - begin:.1f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
