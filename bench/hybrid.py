"""A hybrid model, three layers in four with a recurrent state, against transformers' `generate` and against itself.

The model is random, of 500 MB in float32, with the shapes of Qwen3.5. Both sides use one thread and take turns; results
are medians, and only ratios count. Usage:

    python -m bench.hybrid --json
    python -m bench.hybrid --only decode prefill --context 1024 --repeats 3
    python -m bench.hybrid --only restart --document 8192 --into hybrid.json

decode     tokens per second of a generation after `--context` tokens that both sides hold
decode_8   the same for 8 generations at once, each after other `--batch-context` tokens, against a batch of 8
prefill    tokens per second of reading `--context` tokens
restart    the service is killed and started again: first_token_s of a question to a context of `--document` tokens,
           from the question, over full_ingest_s, the time that reading it took
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.durable import restart
from bench.durable.options import Goal, Options, Row, result, spread
from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.baseline import Baseline
from bench.harness.parts import parser_of, run_parts
from bench.harness.service import Service, client_of
from bench.harness.subjects import Subject, subject_of
from bench.harness.timing import Decoded, common_prefix, compare
from longleaf.config import EngineConfig
from zoo.checkpoints import make_checkpoint

MODEL = "random-qwen3.5-500mb"
CHUNK_SIZE = 4096
BATCH = 8
MIN_DECODE, MIN_PREFILL, MAX_RESTART = 1.5, 1.5, 0.1
"""Smallest rates relative to transformers, and the largest time to the first token relative to reading again."""


@contextmanager
def random_qwen() -> Iterator[Subject]:
    """Six layers of gated delta net and two that attend, with the heads of Qwen3.5-0.8B."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        yield subject_of(
            make_checkpoint(
                Path(folder, MODEL),
                "qwen3_5",
                num_layers=8,
                hidden=1024,
                num_heads=8,
                num_kv_heads=2,
                head_dim=256,
                ffn=2048,
                max_positions=131072,
                initializer_range=0.02,
                settings={
                    "linear_num_key_heads": 16,
                    "linear_num_value_heads": 16,
                    "linear_key_head_dim": 128,
                    "linear_value_head_dim": 128,
                },
            )
        )


@contextmanager
def both_sides(measured: Subject) -> Iterator[tuple[Service, Baseline]]:
    """A service at world size 1 and transformers."""
    config = EngineConfig(
        model=str(measured.folder),
        chunk_size=CHUNK_SIZE,
        threads_per_rank=1,
        max_draft_tokens=0,
        verify_model=False,
    )
    baseline = Baseline(measured.folder)
    with client_of(None, config, "local") as client:
        yield Service(client), baseline


def decode(options: argparse.Namespace, *, batch: int, num_tokens: int) -> Row:
    """Generations after contexts of `num_tokens`. The first turn is not counted."""
    with random_qwen() as measured, both_sides(measured) as (service, baseline):
        texts = [measured.tokens(num_tokens, seed=i) for i in range(batch)]
        contexts = [f"decode-{i}" for i in range(batch)]
        for context, ids in zip(contexts, texts, strict=True):
            service.ingest(context, ids)
        questions = [measured.tokens(1, seed=1000 + i) for i in range(batch)]
        prompts = [a + b for a, b in zip(texts, questions, strict=True)]
        cache = baseline.prefill_batch(texts, CHUNK_SIZE)
        ours, theirs = list[Decoded](), list[Decoded]()
        for turn in range(options.repeats + 1):
            ours.append(service.decode_together(contexts, questions, options.tokens))
            theirs.append(baseline.decode_together(prompts, cache, options.tokens))
            log(f"{batch} at once, turn {turn}: {ours[-1].decode_rate:.1f} and {theirs[-1].decode_rate:.1f} tokens/s")
    found = compare([one.decode_rate for one in ours[1:]], [one.decode_rate for one in theirs[1:]])
    same = min(common_prefix(a, b) for a, b in zip(ours[-1].answers, theirs[-1].answers, strict=True))
    figures = {"model": MODEL, "batch": batch, "new_tokens": options.tokens, **found, "same_tokens": same}
    return _row(options, num_tokens, figures, Goal("decode", found["ratio"], MIN_DECODE, is_least=True))


def prefill(options: argparse.Namespace) -> Row:
    """Reads other tokens in each turn, in chunks of one size on both sides. The first turn is not counted."""
    ours, theirs = list[float](), list[float]()
    with random_qwen() as measured, both_sides(measured) as (service, baseline):
        for turn in range(options.repeats + 1):
            ids = measured.tokens(options.context, seed=turn)
            ours.append(len(ids) / service.ingest("document", ids))
            theirs.append(len(ids) / baseline.prefill_seconds(ids, CHUNK_SIZE))
            service.delete("document")
            log(f"prefill, turn {turn}: {ours[-1]:.1f} and {theirs[-1]:.1f} tokens/s")
    found = compare(ours[1:], theirs[1:])
    goal = Goal("prefill", found["ratio"], MIN_PREFILL, is_least=True)
    return _row(options, options.context, {"model": MODEL, **found}, goal)


def after_restart(options: argparse.Namespace) -> Row:
    """Kills the service and starts it over the same folder, in every turn."""
    parameters = Options(tokens=options.document, repeats=options.repeats, world_size=1)
    with random_qwen() as measured, TemporaryDirectory(prefix="longleaf-bench-") as place:
        data_dir = Path(place, "data")
        retained = restart.keep(measured, data_dir, parameters)
        seconds, num_equal = list[float](), 0
        for turn in range(options.repeats):
            _, answered = restart.start(measured, data_dir, parameters, restart.CONTEXT)
            seconds.append(answered.first_token_s)
            num_equal += answered.token_ids == retained.answer
            log(f"restart {turn + 1}: first token after {answered.first_token_s:.2f} s")
    ratio = median(seconds) / retained.full_ingest_s
    figures = {
        "model": MODEL,
        "full_ingest_s": round(retained.full_ingest_s, 3),
        "first_token_s": round(median(seconds), 3),
        **spread("first_token_s", seconds),
        "snapshot_bytes": retained.snapshot_bytes,
        "equal_answers": num_equal,
    }
    return _row(options, options.document, figures, Goal("restart", ratio, MAX_RESTART))


def _row(options: argparse.Namespace, num_tokens: int, figures: Row, goal: Goal) -> Row:
    return result(Options(tokens=num_tokens, repeats=options.repeats, world_size=1), figures, [goal])


PARTS: dict[str, Callable[[argparse.Namespace], Row]] = {
    "decode": lambda options: decode(options, batch=1, num_tokens=options.context),
    "decode_8": lambda options: decode(options, batch=BATCH, num_tokens=options.batch_context),
    "prefill": prefill,
    "restart": after_restart,
}


def main() -> None:
    unwind_on_terminate()
    parser = parser_of("hybrid", __doc__, PARTS)
    parser.add_argument("--context", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--batch-context", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--document", type=int, default=65536, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each generation, at least 2")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each side")
    options = parser.parse_args()
    if min(options.repeats, options.tokens - 1, options.context, options.batch_context, options.document) < 1:
        parser.error("too few repeats or tokens to measure")
    run_parts("hybrid", PARTS, options, lambda name: PARTS[name](options))


if __name__ == "__main__":
    main()
