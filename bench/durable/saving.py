"""Saving: what an ingest and another stream notice of it, and how fast it is beside a plain copy."""

import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from bench.durable.contexts import Row
from bench.durable.services import Service, copy_s, manifests, pieces, serving, wait_saved
from bench.harness.arguments import tell
from bench.harness.subjects import Subject
from longleaf.messages import Delta
from longleaf.storage.store import Store

STREAMED = 4096
OBJECT_BYTES, NUM_OBJECTS = 64 << 20, 8


def ingest(measured: Subject, num_tokens: int, repeats: int) -> Row:
    """The same document, with and without snapshots, in turn."""
    document = measured.tokens(num_tokens)
    found = dict[str, list[float]]({"seal": [], "off": [], "saved_s": [], "copy_s": []})
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):  # the first one warms up
            for mode in ("seal", "off"):
                data_dir = Path(folder, f"{mode}-{turn}")
                with serving(data_dir, num_tokens, snapshots=mode) as service:  # pyright: ignore[reportArgumentType]
                    service.ingest(measured.tokens(2048, seed=2), "warm-up")
                    num_before = len(manifests(data_dir)) if mode == "off" else 1
                    if mode == "seal":
                        wait_saved(data_dir)
                    acknowledged = service.ingest(document)
                    saved = wait_saved(data_dir, num_before) if mode == "seal" else 0.0
                if turn:
                    found[mode].append(acknowledged)
                if turn and mode == "seal":
                    found["saved_s"].append(saved)
                    found["copy_s"].append(copy_s(pieces(data_dir), Path(folder, "copy")))
                    told = f"saved {saved:.2f} s later, copied {found['copy_s'][-1]:.2f} s"
                    tell(f"ingest {turn}: {acknowledged:.2f} s, {told}")
    medians = {name: median(values) for name, values in found.items()}
    row: Row = {
        "context_tokens": num_tokens,
        "with_s": round(medians["seal"], 3),
        "without_s": round(medians["off"], 3),
    }
    row |= {"ratio": round(medians["seal"] / medians["off"], 3), "target": 1.05}
    row |= {"saved_s": round(medians["saved_s"], 3), "copy_s": round(medians["copy_s"], 3)}
    return row | {"saved_ratio": round(medians["saved_s"] / medians["copy_s"], 3), "saved_target": 2.0}


def beside(measured: Subject, num_tokens: int) -> Row:
    """Tokens per second of a stream while a document is saved, beside those before and after."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), num_tokens) as service:
        service.ingest(measured.tokens(2048, seed=2), "warm-up")
        wait_saved(Path(folder))
        times, stop = list[float](), threading.Event()
        reading = threading.Thread(target=stream, args=(service, measured.tokens(64, seed=3), times, stop))
        reading.start()
        service.ingest(measured.tokens(num_tokens))
        begin = time.perf_counter()
        wait_saved(Path(folder), 1)
        end = time.perf_counter()
        time.sleep(max(2.0, end - begin))
        after = time.perf_counter()
        stop.set()
        reading.join()
    during, quiet = rate(times, begin, end), rate(times, end, after)
    row: Row = {"context_tokens": num_tokens, "seconds": round(end - begin, 3), "during_tok_s": round(during, 1)}
    return row | {"quiet_tok_s": round(quiet, 1), "ratio": round(during / quiet, 3), "target": 0.8}


def stream(service: Service, question: list[int], times: list[float], stop: threading.Event) -> None:
    """Reads one answer after the other."""
    while not stop.is_set():
        for event in service.client.generate(question, max_tokens=STREAMED, ignore_end_token=True):
            if isinstance(event, Delta):
                times += [time.perf_counter()] * len(event.token_ids)
            if stop.is_set():
                break


def rate(times: list[float], begin: float, end: float) -> float:
    return sum(begin <= at < end for at in times) / (end - begin)


def storage(repeats: int) -> Row:
    """Objects of 64 MiB in a folder, beside a plain copy with fsync, in turn."""
    content = bytes(OBJECT_BYTES)
    found = dict[str, list[float]]({"put_s": [], "get_s": [], "copy_s": []})
    with tempfile.TemporaryDirectory() as folder:
        store, source = Store.open(str(Path(folder, "store"))), Path(folder, "source")
        source.write_bytes(content)
        for turn in range(repeats + 1):
            names = [f"object-{turn}-{number}" for number in range(NUM_OBJECTS)]
            began = time.perf_counter()
            written = [store.put(name, [content]) for name in names]
            put = time.perf_counter() - began
            copied = copy_s([source] * NUM_OBJECTS, Path(folder, "copy"))
            began = time.perf_counter()
            for name, one in zip(names, written, strict=True):
                store.get(name, one.digest)
            got = time.perf_counter() - began
            store.delete(names)
            if turn:
                for name, seconds in (("put_s", put), ("get_s", got), ("copy_s", copied)):
                    found[name].append(seconds)
    medians = {name: median(values) for name, values in found.items()}
    size = NUM_OBJECTS * OBJECT_BYTES / 1e6
    row: Row = {name.replace("_s", "_mb_s"): round(size / seconds, 1) for name, seconds in medians.items()}
    row |= {"put_ratio": round(medians["copy_s"] / medians["put_s"], 3)}
    return row | {"get_ratio": round(medians["copy_s"] / medians["get_s"], 3), "target": 0.5}
