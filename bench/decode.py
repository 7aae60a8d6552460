"""Decode speed on long contexts: this service at world size 1 against transformers' `generate`.

Both hold the same contexts before the clock runs, use one thread each and take turns. In a batch each generation has a
separate context, or all share one; `generate` must then hold the shared context once per row. Usage:

    python -m bench.decode --json
    python -m bench.decode --context 8000 --model random-llama --batch 8
"""

from bench.harness.arguments import Arguments, log, parse, show
from bench.harness.baseline import Baseline
from bench.harness.machine import describe
from bench.harness.service import Service, running
from bench.harness.subjects import Subject, is_there, subject
from bench.harness.timing import Decoded, common_prefix, compare

CHUNK_SIZE = 4096
LONGEST_REAL_PREFILL = 16384
"""Above this the baseline's cache is filled with random keys: its speed is the same, and the prefill takes minutes.
Batches are measured up to it."""


def main() -> None:
    arguments = parse(__doc__, contexts=(8000, 64000), tokens=64, repeats=5, batches=(1, 8))
    rows: list[dict[str, object]] = []
    for name in filter(is_there, arguments.models):
        with subject(name) as measured:
            rows += measure(measured, arguments)
    show(rows, arguments)


def measure(measured: Subject, arguments: Arguments) -> list[dict[str, object]]:
    """One row per context length that the model can hold, batch size, and sharing."""
    lengths = [n for n in arguments.contexts if n + arguments.tokens < measured.max_positions]
    baseline = Baseline(measured.folder)
    rows: list[dict[str, object]] = []
    with running(measured.folder, chunk_size=CHUNK_SIZE) as service:
        for batch in arguments.batches:
            for length in lengths:
                if batch == 1:
                    rows.append(row(measured, arguments, service, baseline, length, 1, 1))
                elif length <= LONGEST_REAL_PREFILL:
                    rows += [row(measured, arguments, service, baseline, length, batch, n) for n in (batch, 1)]
    return rows


def row(
    measured: Subject,
    arguments: Arguments,
    service: Service,
    baseline: Baseline,
    length: int,
    batch: int,
    num_contexts: int,
) -> dict[str, object]:
    """Alternates service and baseline on the same `length` tokens of each context."""
    is_real = length <= LONGEST_REAL_PREFILL
    texts = [measured.tokens(length, seed=i) for i in range(num_contexts)]
    log(f"{measured.name}, {num_contexts} x {length} tokens, batch {batch}: ingesting")
    resident = [f"decode-{i}" for i in range(num_contexts)]
    for context, ids in zip(resident, texts, strict=True):
        service.ingest(context, ids)
    contexts = [resident[i % num_contexts] for i in range(batch)]
    begun = [texts[i % num_contexts] for i in range(batch)]
    questions = [measured.tokens(1, seed=1000 + i) for i in range(batch)]
    prompts = [a + b for a, b in zip(begun, questions, strict=True)]
    cache = baseline.prefill_batch(begun, CHUNK_SIZE) if is_real else baseline.random_cache(length)
    ours: list[Decoded] = []
    theirs: list[Decoded] = []
    for i in range(arguments.repeats + 1):
        ours.append(service.decode_together(contexts, questions, arguments.tokens))
        theirs.append(baseline.decode_together(prompts, cache, arguments.tokens))
        log(f"  {'warm-up' if i == 0 else i}: {ours[-1].decode_rate:.1f} and {theirs[-1].decode_rate:.1f} tokens/s")
    for context in resident:
        service.delete(context)
    wall = compare([d.wall_rate for d in ours[1:]], [d.wall_rate for d in theirs[1:]])
    pairs = zip(ours[-1].answers, theirs[-1].answers, strict=True)
    return {
        "bench": "decode",
        "model": measured.name,
        "context_tokens": length,
        "batch": batch,
        "contexts": num_contexts,
        **compare([d.decode_rate for d in ours[1:]], [d.decode_rate for d in theirs[1:]]),
        "wall_ratio": wall["ratio"],
        "new_tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "threads": 1,
        "same_tokens": min(common_prefix(a, b) for a, b in pairs) if is_real else None,
        "baseline_cache": "prefilled" if is_real else "random",
        "machine": describe(),
    }


if __name__ == "__main__":
    main()
