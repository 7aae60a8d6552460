"""Decode speed on a long context: this service at world size 1 against transformers' `generate`.

Both hold the same context before the clock runs, use one thread each and take turns. Usage:

    python -m bench.decode --json
    python -m bench.decode --context 8000 --model random-llama
"""

from bench.arguments import Arguments, parse, show, tell
from bench.baseline import Baseline
from bench.machine import describe
from bench.service import Service, running
from bench.subjects import Subject, is_there, subject
from bench.timing import Decoded, common_prefix, compare

CHUNK_SIZE = 4096
LONGEST_REAL_PREFILL = 16384
"""Above this the baseline's cache is filled with random keys: its speed is the same, and the prefill takes minutes."""


def main() -> None:
    arguments = parse(__doc__, contexts=(8000, 64000), tokens=64, repeats=5)
    rows: list[dict[str, object]] = []
    for name in filter(is_there, arguments.models):
        with subject(name) as measured:
            rows += measure(measured, arguments)
    show(rows, arguments)


def measure(measured: Subject, arguments: Arguments) -> list[dict[str, object]]:
    """One row per context length that the model can hold."""
    lengths = [n for n in arguments.contexts if n + arguments.tokens < measured.max_positions]
    baseline = Baseline(measured.folder)
    with running(measured.folder, chunk_size=CHUNK_SIZE) as service:
        return [row(measured, arguments, service, baseline, length) for length in lengths]


def row(
    measured: Subject, arguments: Arguments, service: Service, baseline: Baseline, length: int
) -> dict[str, object]:
    """Alternates service and baseline on the same `length` tokens."""
    is_real = length <= LONGEST_REAL_PREFILL
    ids = measured.tokens(length + 1)
    tell(f"{measured.name}, {length} tokens: ingesting")
    context = f"decode-{length}"
    service.ingest(context, ids[:-1])
    cache = baseline.prefill(ids[:-1], CHUNK_SIZE) if is_real else baseline.random_cache(length)
    ours: list[Decoded] = []
    theirs: list[Decoded] = []
    for i in range(arguments.repeats + 1):
        ours.append(service.decode(context, ids[-1:], arguments.tokens))
        theirs.append(baseline.decode(ids, cache, arguments.tokens))
        tell(f"  {'warm-up' if i == 0 else i}: {ours[-1].decode_rate:.1f} and {theirs[-1].decode_rate:.1f} tokens/s")
    service.delete(context)
    wall = compare([d.wall_rate for d in ours[1:]], [d.wall_rate for d in theirs[1:]])
    return {
        "bench": "decode",
        "model": measured.name,
        "context_tokens": length,
        "batch": 1,
        **compare([d.decode_rate for d in ours[1:]], [d.decode_rate for d in theirs[1:]]),
        "wall_ratio": wall["ratio"],
        "new_tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "threads": 1,
        "same_tokens": common_prefix(ours[-1].token_ids, theirs[-1].token_ids) if is_real else None,
        "baseline_cache": "prefilled" if is_real else "random",
        "machine": describe(),
    }


if __name__ == "__main__":
    main()
