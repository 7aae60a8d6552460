"""A model of 6 GB on four ranks, each of which has less memory than the model takes, also after the loss of a rank."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil

from bench.durable.options import Goal, Row
from bench.harness.arguments import log
from bench.harness.memory import parse
from bench.harness.service import START_SECONDS
from bench.harness.subjects import Subject, subject_of
from longleaf.client import Client
from longleaf.launch import ServiceProcess
from longleaf.types import Delta, Recovering

NUM_RANKS = 4
MAX_BYTES, MAX_BYTES_WITH_ROOM = 2_400_000_000, 3_000_000_000
"""Maximum anonymous and shared memory of each rank, without and with room for weights of a lost rank."""
KV_BYTES = 1 << 28
DOCUMENT_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 200, 8, 8
NEW_TOKENS_WITH_LOSS = 16
SHAPE: dict[str, Any] = {
    "num_layers": 8,
    "hidden": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn": 11264,
    "vocab_size": 8192,
}
"""6.0 GB in float32."""
SAMPLE_SECONDS = 0.02
COMMAND = (
    f"serve --weights sharded --world-size {NUM_RANKS} --launcher local --port 0 --kv-bytes {KV_BYTES} "
    f"--start-timeout {START_SECONDS:.0f}"
)


def measure() -> Row:
    """Peaks of memory on all ranks, and whether the answer about a document equals that of `generate`."""
    with _prepared(NEW_TOKENS) as (measured, expected):
        return _serve(measured, expected)


def measure_loss() -> Row:
    """The same with room for the weights of a lost rank: a rank is killed during the answer, and the others continue
    it.
    """
    with _prepared(NEW_TOKENS_WITH_LOSS) as (measured, expected):
        return _serve_with_loss(measured, expected, spare_ranks=1)


def measure_replacement() -> Row:
    """The same without room: the answer continues when the replacement of the killed rank has read its share."""
    with _prepared(NEW_TOKENS_WITH_LOSS) as (measured, expected):
        return _serve_with_loss(measured, expected, spare_ranks=0)


@contextmanager
def _prepared(num_tokens: int) -> Iterator[tuple[Subject, list[int]]]:
    """The checkpoint, and the tokens that transformers generates."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:  # whose memory is then free
            path, expected = apart.submit(_prepare, Path(folder, "random-llama-6gb"), num_tokens).result()
        log(f"generate: {expected}")
        yield subject_of(path), expected


def _prepare(folder: Path, num_tokens: int) -> tuple[Path, list[int]]:
    """Makes the checkpoint; returns its folder, and the tokens that transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM

    from zoo.checkpoints import make_checkpoint

    make_checkpoint(folder, "llama", initializer_range=0.02, **SHAPE)
    log(f"made {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")
    document, question = _tokens(subject_of(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([document + question])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return folder, output[0, ids.shape[1] :].tolist()


def _tokens(measured: Subject) -> tuple[list[int], list[int]]:
    return measured.tokens(DOCUMENT_TOKENS), measured.tokens(QUESTION_TOKENS, seed=1)


@contextmanager
def _running(measured: Subject, options: str) -> "Iterator[tuple[Client, PeakMemory]]":
    """A client of the service, and the memory of its ranks."""
    command = [sys.executable, "-P", "-c", "from longleaf.cli.main import main; main()", *options.split()]
    with (
        ServiceProcess([*command, "--model", str(measured.folder)]) as process,
        PeakMemory(psutil.Process(process.pid)) as peaks,
        Client(process.wait_ready(START_SECONDS)) as client,
    ):
        yield client, peaks


def _serve(measured: Subject, expected: list[int]) -> Row:
    document, question = _tokens(measured)
    began = time.perf_counter()
    with _running(measured, COMMAND) as (client, peaks):
        started = time.perf_counter() - began
        pids = [worker.pid for worker in client.cluster().workers]
        after_start = [peaks.of(pid) for pid in pids]
        log(f"ready after {started:.0f} s; peaks {after_start}")
        client.ingest("document", tuple(document))
        events = client.generate(question, context="document", max_tokens=NEW_TOKENS, ignore_end_token=True)
        found = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        at_end = [peaks.of(pid) for pid in pids]
        log(f"answer: {found}; peaks {at_end}")
    goals = [
        Goal("peak of a rank, GB", max(at_end) / 1e9, MAX_BYTES / 1e9),
        Goal("equal tokens", float(found == expected), 1.0, is_least=True),
    ]
    return {
        "command": f"longleaf {COMMAND}",
        "weight_bytes": (measured.folder / "model.safetensors").stat().st_size,
        "start_seconds": round(started, 1),
        "peak_bytes": at_end,
        "peak_bytes_at_start": after_start,
        "tokens": found,
        "generate_tokens": expected,
        "goals": [goal.as_row() for goal in goals],
    }


def _serve_with_loss(measured: Subject, expected: list[int], spare_ranks: int) -> Row:
    document, question = _tokens(measured)
    options = f"{COMMAND} --spare-ranks {spare_ranks}"
    max_bytes = MAX_BYTES_WITH_ROOM if spare_ranks else MAX_BYTES
    with _running(measured, options) as (client, peaks):
        pids = [worker.pid for worker in client.cluster().workers]
        client.ingest("document", tuple(document))
        after_start = [peaks.of(pid) for pid in pids]
        log(f"ready and ingested; peaks {after_start}")
        tokens, missing, num_ranks = list[int](), list[float](), 0
        killed = continued = 0.0
        sampling = {"max_tokens": len(expected), "ignore_end_token": True}
        for event in client.generate(question, context="document", **sampling):
            if isinstance(event, Recovering):
                missing.append(event.missing_weights)
            if not isinstance(event, Delta):
                continue
            tokens += event.token_ids
            if not killed:
                os.kill(pids[-1], signal.SIGKILL)
                killed = time.perf_counter()
            elif missing and not continued:
                continued = time.perf_counter()
                workers = client.cluster().workers
                num_ranks, pids = len(workers), list({*pids, *(worker.pid for worker in workers)})
                log(f"{num_ranks} ranks continue after {continued - killed:.1f} s")
        at_end = [peaks.of(pid) for pid in pids]
        log(f"answer: {tokens}; peaks {at_end}")
    goals = [
        Goal("peak of a rank, GB", max(at_end) / 1e9, max_bytes / 1e9),
        Goal("equal tokens", float(tokens == expected), 1.0, is_least=True),
        Goal("ranks that continue", num_ranks, float(NUM_RANKS - spare_ranks), is_least=True),
        Goal("ranks that continue", num_ranks, float(NUM_RANKS - spare_ranks)),
    ]
    return {
        "command": f"longleaf {options}",
        "weight_bytes": (measured.folder / "model.safetensors").stat().st_size,
        "missing_weights": round(max(missing, default=0.0), 4),
        "seconds_without_tokens": round(continued - killed, 1),
        "peak_bytes": at_end,
        "peak_bytes_before_loss": after_start,
        "tokens": tokens,
        "generate_tokens": expected,
        "goals": [goal.as_row() for goal in goals],
    }


class PeakMemory:
    """The peaks of anonymous and shared memory, by process, below a root process. To be entered."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._peaks: dict[int, int] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def of(self, pid: int) -> int:
        """In bytes."""
        return self._peaks[pid]

    def _sample(self) -> None:
        while not self._has_ended.wait(SAMPLE_SECONDS):
            try:
                descendants = self._root.children(recursive=True)
            except psutil.NoSuchProcess:
                return
            for process in descendants:
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    used = parse(status, "RssAnon") + parse(status, "RssShmem")
                except (OSError, StopIteration):  # it has ended
                    continue
                self._peaks[process.pid] = max(used, self._peaks.get(process.pid, 0))
