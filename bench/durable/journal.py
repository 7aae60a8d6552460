"""The journal's share of a step: the time to append a step's tokens over the duration of the step."""

import asyncio
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.durable.options import Goal, Options, Row, result
from bench.durable.service import TimedService, command
from bench.harness.arguments import log
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, Subject, subject
from coordinator.engine_messages import Admitted, Tokens
from coordinator.persistence.journal.entries import GenerationEntry
from coordinator.persistence.journal.journal import Journal, JournalWriter
from longleaf.client import AsyncClient
from longleaf.sampling import Sampling, Token
from longleaf.types import Finished, Generate, Started

GENERATIONS = 64
MOST_SHARE = 0.01
STEPS = 500
"""Whose tokens are written without a service."""
WARM_UP_STEPS = 50
STREAMED = 128
"""Tokens of each answer of the service."""
RESUME_SECONDS = 60.0
CONTEXT = "document"
QUESTION = (65, 66, 67)


def measure(options: Options) -> Row:
    """The share of steps of many generations that are held; steps of others take turns with them."""
    with subject(EMBEDDED) as measured, TemporaryDirectory(prefix="longleaf-bench-") as folder:
        appended = append_seconds(Path(folder) / "journal", WARM_UP_STEPS + STEPS)[WARM_UP_STEPS:]
        log(f"appending {GENERATIONS} tokens: {median(appended) * 1e6:.0f} us")
        line = command(measured.folder, Path(folder) / "data", world_size=options.world_size, snapshots="off")
        with TimedService(line) as service:
            address = service.wait_ready(START_SECONDS)
            resident, others = asyncio.run(step_seconds(address, measured, options))
    share = median(appended) / median(resident)
    figures = {
        "generations": GENERATIONS,
        "append_us": round(median(appended) * 1e6, 1),
        "step_ms": round(median(resident) * 1e3, 3),
        "step_not_held_ms": round(median(others) * 1e3, 3),
    }
    return result(options, figures, [Goal("journal_share", share, MOST_SHARE)])


def append_seconds(folder: Path, steps: int) -> list[float]:
    """Seconds per step. Each step appends one entry per generation, in the folder layout and format of a service."""
    found = list[float]()
    with records(Journal(folder)) as opened:
        for step in range(steps):
            began = time.perf_counter()
            for number, record in enumerate(opened):
                record.append(Tokens(step, (Token((step + number) % 256),)))
            found.append(time.perf_counter() - began)
    return found


@contextmanager
def records(journal: Journal) -> Iterator[list[JournalWriter]]:
    """Those of generations that have begun."""
    with ExitStack() as stack:
        opened = list[JournalWriter]()
        for number in range(GENERATIONS):
            request = Generate(input="", context=CONTEXT, sampling=Sampling(), resume_seconds=RESUME_SECONDS)
            prompt = array("I", QUESTION).tobytes()
            resident = GenerationEntry(
                request_id=f"{number}", request=request, question=b"", prompt=prompt, deadline=None
            )
            opened.append(stack.enter_context(journal.begin(resident)))
            opened[-1].append(Admitted(len(QUESTION), 0))
        yield opened


async def step_seconds(address: str, measured: Subject, options: Options) -> tuple[list[float], list[float]]:
    """Median seconds per step with all generations running, in turns: resumable generations, then others."""
    resident, others = list[float](), list[float]()
    async with AsyncClient(address) as client:
        await client.ingest(CONTEXT, tuple(measured.tokens(options.tokens)))
        for turn in range(options.repeats + 1):
            both = [await stream_all(client, is_resumable=is_resident) for is_resident in (True, False)]
            if turn:
                log(f"{GENERATIONS} generations: a step takes {both[0] * 1e3:.2f} ms held, {both[1] * 1e3:.2f} ms not")
                resident.append(both[0])
                others.append(both[1])
    return resident, others


async def stream_all(client: AsyncClient, *, is_resumable: bool) -> float:
    """Median seconds between two tokens of generations that run at once."""
    return median(await asyncio.gather(*(_stream(client, is_resumable) for _ in range(GENERATIONS))))


async def _stream(client: AsyncClient, is_resumable: bool) -> float:
    """Seconds between two tokens of one generation, on average."""
    requested = client.generate(
        QUESTION, context=CONTEXT, max_tokens=STREAMED, ignore_end_token=True, resumable=is_resumable
    )
    request_id = ""
    async for event in requested:
        if isinstance(event, Started):
            request_id = event.request_id
        if isinstance(event, Finished):
            if is_resumable:  # else it would be, for a minute, beside those of the turns to come
                await client.cancel_generation(request_id)
            return event.timings.decode_seconds / (STREAMED - 1)
    raise RuntimeError("the answer has no end")
