"""A small chat model on one thread against transformers' `generate`: decode after a short prompt, and a longer ingest.

The time between two steps matters most there. Both sides use one thread and take turns; the service drafts nothing.
Usage, with the folder of a checkpoint such as that of `longleaf models fetch smollm2 DIR`:

    python -m bench.small DIR --json
    python -m bench.small DIR --prompt 41 --document 6000
"""

import argparse
import json
import time
from pathlib import Path

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.baseline import Baseline
from bench.harness.machine import describe
from bench.harness.service import Service, client_of
from bench.harness.subjects import Subject, subject_of
from bench.harness.timing import compare
from longleaf.config import EngineConfig

DECODE_TARGET, INGEST_TARGET = 1.1, 1.0


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--prompt", type=int, default=41, metavar="TOKENS")
    parser.add_argument("--document", type=int, default=6000, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each generation, at least 2")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each side")
    options = parser.parse_args()
    measured, baseline = subject_of(options.model.absolute()), Baseline(options.model)
    config = EngineConfig(model=str(measured.folder), max_draft_tokens=0, verify_model=False)
    with client_of(None, config, "local") as client:
        service = Service(client)
        result = {
            "bench": "small",
            "model": measured.name,
            "decode": decode(measured, service, baseline, options) | {"target": DECODE_TARGET},
            "ingest": ingest(measured, service, baseline, options) | {"target": INGEST_TARGET},
            "machine": describe(),
        }
    print(json.dumps(result, indent=1) if options.json else {part: result[part] for part in ("decode", "ingest")})


def decode(
    measured: Subject, service: Service, baseline: Baseline, options: argparse.Namespace
) -> dict[str, float | int]:
    """Tokens per second after the prompt. The first turn is not counted."""
    prompt, question = measured.tokens(options.prompt), measured.tokens(1, seed=1000)
    service.ingest("prompt", prompt)
    cache = baseline.prefill(prompt, options.prompt)
    ours, theirs = list[float](), list[float]()
    for turn in range(options.repeats + 1):
        ours.append(service.decode("prompt", question, options.tokens).decode_rate)
        theirs.append(baseline.decode(prompt + question, cache, options.tokens).decode_rate)
        log(f"decode {turn}: {ours[-1]:.1f} and {theirs[-1]:.1f} tokens/s")
    return {"prompt_tokens": options.prompt, "new_tokens": options.tokens, **compare(ours[1:], theirs[1:])}


def ingest(
    measured: Subject, service: Service, baseline: Baseline, options: argparse.Namespace
) -> dict[str, float | int]:
    """Tokens per second of reading a document; transformers reads it in one pass. The first turn is not counted."""
    ours, theirs = list[float](), list[float]()
    for turn in range(options.repeats + 1):
        ids = measured.tokens(options.document, seed=turn)
        began = time.perf_counter()
        service.ingest(f"document-{turn}", ids)
        between = time.perf_counter()
        baseline.prefill(ids, options.document)
        ours.append(options.document / (between - began))
        theirs.append(options.document / (time.perf_counter() - between))
        service.delete(f"document-{turn}")
        log(f"ingest {turn}: {ours[-1]:.1f} and {theirs[-1]:.1f} tokens/s")
    return {"document_tokens": options.document, **compare(ours[1:], theirs[1:])}


if __name__ == "__main__":
    main()
