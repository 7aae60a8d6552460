"""Prefill speed: IngestContext at world size 1 against one plain forward with a cache, in chunks of the same size.

Both use one thread and take turns. Usage:

    python -m bench.ingest --json
    python -m bench.ingest --context 4000 --model random-llama
"""

import time

from bench.harness.arguments import Arguments, log, parse, show
from bench.harness.baseline import Baseline
from bench.harness.machine import describe
from bench.harness.service import Service, running
from bench.harness.subjects import Subject, is_there, subject
from bench.harness.timing import compare

CHUNK_SIZE = 4096
WARM_UP = 2048


def main() -> None:
    arguments = parse(__doc__, contexts=(4000, 8000, 16000), tokens=0, repeats=3)
    rows: list[dict[str, object]] = []
    for name in filter(is_there, arguments.models):
        with subject(name) as measured:
            rows += measure(measured, arguments)
    show(rows, arguments)


def measure(measured: Subject, arguments: Arguments) -> list[dict[str, object]]:
    """One row per context length that the model can hold."""
    lengths = [n for n in arguments.contexts if n < measured.max_positions]
    baseline = Baseline(measured.folder)
    with running(measured.folder, chunk_size=CHUNK_SIZE) as service:
        once(service, baseline, measured.tokens(WARM_UP))
        return [row(measured, arguments, service, baseline, length) for length in lengths]


def row(
    measured: Subject, arguments: Arguments, service: Service, baseline: Baseline, length: int
) -> dict[str, object]:
    """Alternates service and baseline; every repeat reads other tokens."""
    ours: list[float] = []
    theirs: list[float] = []
    for i in range(arguments.repeats):
        our_seconds, their_seconds = once(service, baseline, measured.tokens(length, seed=i + 1))
        ours.append(length / our_seconds)
        theirs.append(length / their_seconds)
        log(f"{measured.name}, {length} tokens, {i + 1}: {ours[-1]:.0f} and {theirs[-1]:.0f} tokens/s")
    return {
        "bench": "ingest",
        "model": measured.name,
        "context_tokens": length,
        "batch": 1,
        **compare(ours, theirs),
        "chunk_size": CHUNK_SIZE,
        "repeats": arguments.repeats,
        "threads": 1,
        "machine": describe(),
    }


def once(service: Service, baseline: Baseline, ids: list[int]) -> tuple[float, float]:
    """Seconds of one ingest of `ids`: service, then baseline."""
    our_seconds = service.ingest("ingest", ids)
    service.delete("ingest")
    begin = time.perf_counter()
    baseline.prefill(ids, CHUNK_SIZE)
    return our_seconds, time.perf_counter() - begin


if __name__ == "__main__":
    main()
