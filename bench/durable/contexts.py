"""Contexts that come back: after everything was killed, after a rank was, and when a parked one is asked."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.durable.services import CONTEXT, WORLD_SIZE, Service, serving, wait_saved
from bench.harness.arguments import tell
from bench.harness.subjects import Subject

QUESTION = 20
"""Tokens of it."""
Row = dict[str, object]


def restart(measured: Subject, num_tokens: int, repeats: int) -> Row:
    """Everything is killed: to the first answered question, beside a service that had nothing."""
    document, question = measured.tokens(num_tokens), measured.tokens(QUESTION, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        kept, empty = Path(folder, "kept"), Path(folder, "empty")
        with serving(kept, num_tokens) as service:
            service.ingest(measured.tokens(2048, seed=2), "warm-up")
            service.client.delete_context("warm-up")
            full = service.ingest(document)
            tell(f"{num_tokens:,} tokens are read in {full:.1f} s, and saved {wait_saved(kept):.1f} s later")
            service.kill()
        found = dict[str, list[float]]()
        for turn in range(repeats):
            empty_s = answered(Path(empty, str(turn)), num_tokens, question, None)["total_s"]
            parts = answered(kept, num_tokens, question, CONTEXT)
            for name, value in {**parts, "empty_start_s": empty_s}.items():
                found.setdefault(name, []).append(value)
            tell(f"restart {turn + 1}: {parts['total_s']:.1f} s, with nothing {empty_s:.1f} s")
    row: Row = {name: round(median(values), 3) for name, values in found.items()}
    row["restart_s"] = row.pop("total_s")
    ratio = (median(found["total_s"]) - median(found["empty_start_s"])) / full
    return row | {
        "context_tokens": num_tokens,
        "full_ingest_s": round(full, 3),
        "ratio": round(ratio, 3),
        "target": 0.2,
    }


def answered(data_dir: Path, num_tokens: int, question: list[int], name: str | None) -> dict[str, float]:
    """Seconds from the start of a service to its first answer, and the parts of it; it is killed then."""
    with serving(data_dir, num_tokens) as service:
        parts = service.ask(question, name)
        total = time.perf_counter() - service.began
        service.kill()
    return {"ready_s": service.ready_s, **parts, "total_s": total}


def loss(measured: Subject, num_tokens: int, repeats: int) -> Row:
    """A rank is killed: until all is held again."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), 2 * num_tokens) as service:
        service.ingest(measured.tokens(2048, seed=2), "warm-up")
        num_saved = 1
        full = service.ingest(measured.tokens(num_tokens))
        wait_saved(Path(folder), num_saved)
        times = [lose(service, turn) for turn in range(repeats)]
    ratio = median(times) / full
    row: Row = {"context_tokens": num_tokens, "full_ingest_s": round(full, 3), "recovery_s": round(median(times), 3)}
    return row | {"kills": repeats, "ratio": round(ratio, 3), "target": 0.3}


def lose(service: Service, turn: int) -> float:
    """Seconds until the keys of a killed rank are held again. Waits until another one has its place."""
    before = service.client.cluster()
    began = time.perf_counter()
    os.kill(before.workers[turn % WORLD_SIZE].pid, signal.SIGKILL)
    recovered = 0.0
    while True:
        found = service.client.cluster()
        is_over = found.epoch > before.epoch and found.recovery is not None and found.recovery.is_over
        recovered = recovered or (time.perf_counter() - began if is_over else 0.0)
        if recovered and found.world_size == before.world_size:
            tell(f"loss {turn + 1}: all is held again after {recovered:.2f} s")
            return recovered
        time.sleep(0.02)


def parked(measured: Subject, num_tokens: int, repeats: int) -> Row:
    """A parked context is asked: to the first token, from storage and read again, in turn."""
    document, question = measured.tokens(num_tokens), measured.tokens(QUESTION, seed=1)
    found = dict[str, list[float]]({"restored": [], "reread": []})
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        with serving(kept, num_tokens) as service:
            service.ingest(document)
            wait_saved(kept)
            service.kill()
        bare = Path(folder, "bare")
        shutil.copytree(kept, bare, ignore=shutil.ignore_patterns("snapshots"))
        for turn in range(repeats):
            for name, data_dir in (("restored", kept), ("reread", bare)):
                with serving(data_dir, num_tokens, snapshots="seal" if name == "restored" else "off") as service:
                    service.ask(question, None)
                    found[name].append(service.ask(question)["first_token_s"])
                    service.kill()
            tell(f"parked {turn + 1}: restored {found['restored'][-1]:.2f} s, read again {found['reread'][-1]:.2f} s")
    restored, reread = median(found["restored"]), median(found["reread"])
    row: Row = {"context_tokens": num_tokens, "restored_s": round(restored, 3), "reread_s": round(reread, 3)}
    return row | {"ratio": round(restored / reread, 3), "target": 0.25}
