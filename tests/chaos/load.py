"""Clients of a service with known answers: they query, disconnect midway, ingest and delete, and check every
response."""

import asyncio
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import replace
from random import Random

from longleaf.client import AsyncClient
from longleaf.errors import LongleafError, ResourceExhausted, Unavailable
from longleaf.types import Delta, Recovering
from tests.chaos.reference import NEW, VISITOR, Known, Reference

CLIENTS = 3
BROKE_AGAIN = "the ranks failed there repeatedly"
"""Part of the error of a job that has broken several epochs in a row."""


class Wrong(AssertionError):
    """A response to a client is wrong."""


async def answer(client: AsyncClient, known: Known, counts: Counter[str], leave_after: int = NEW) -> Known:
    """Reads an answer to its end or up to `leave_after` tokens, and returns it as received."""
    tokens, logprobs = list[int](), list[float]()
    options = {"max_tokens": NEW, "ignore_end_token": True, "num_logprobs": 1, **known.options}
    events = client.generate(known.question, context=known.context, **options)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Recovering):
                counts["waits"] += 1
            if isinstance(event, Delta):
                if event.index != len(tokens):
                    raise Wrong(f"{known.context}: index {event.index} after {len(tokens)} tokens")
                tokens += event.token_ids
                logprobs += [one.logprob for one in event.logprobs]
                if len(tokens) >= leave_after:
                    break
    counts["tokens"] += len(tokens)
    return replace(known, tokens=tuple(tokens), logprobs=tuple(logprobs))


def check(found: Known, known: Known, at_least: int = NEW) -> float:
    """Compares tokens and logprobs with the reference. Returns the largest logprob difference as a share of the
    tolerance. An interrupted answer must have `at_least` that many tokens."""
    count = len(found.tokens)
    what = f"{known.context}, question of {len(known.question)} ({'sampled' if known.options else 'greedy'})"
    if count < at_least or found.tokens != known.tokens[:count]:
        raise Wrong(f"{what}: {found.tokens} is not {known.tokens}")
    worst = max(abs(a - b) for a, b in zip(found.logprobs, known.logprobs[:count], strict=True))
    if not worst <= known.tolerance:
        raise Wrong(f"{what}: logprobs differ by {worst:.1e}, more than {known.tolerance:.1e}")
    return worst / known.tolerance


async def ask_poison(client: AsyncClient, poison: tuple[int, ...]) -> None:
    """Checks that a job that breaks every epoch it runs in fails with that reason."""
    try:
        async for _ in client.generate(poison, max_tokens=4, ignore_end_token=True):
            pass
    except LongleafError as error:
        if BROKE_AGAIN not in str(error):
            raise Wrong(f"the poison request failed with another error: {error}") from error
    else:
        raise Wrong("the poison request was answered")


class Load:
    """Clients that run until `end` is called."""

    def __init__(self, client: AsyncClient, reference: Reference, random: Random) -> None:
        self.counts = Counter[str]()
        self._client = client
        self._reference = reference
        self._is_ending = False
        self.may_lose_service = False
        """If set, clients stop when the service becomes unavailable."""
        self.made = set[str]()
        """Acknowledged contexts that are not deleted."""
        self.unsure = set[str]()
        """Contexts whose creation or deletion was not acknowledged."""
        self.deleted = set[str]()
        self._begun = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run_client(number, random.random())) for number in range(CLIENTS)]

    async def wait_started(self) -> None:
        """Returns when the first answer has been read. Raises the error of a client."""
        begun = asyncio.create_task(self._begun.wait())
        done, _ = await asyncio.wait([begun, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        for task in done:
            task.result()

    async def wait_broken(self) -> None:
        """Returns when all clients have stopped because the service is unavailable. Raises the error of a client."""
        await asyncio.gather(*self._tasks)

    async def end(self) -> None:
        """Returns when all clients have read their answers. Raises the error of a client."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_client(self, number: int, seed: float) -> None:
        random = Random(seed)
        while not self._is_ending:
            try:
                if number == 0:
                    await self._ingest_and_delete(f"{VISITOR}-{random.getrandbits(32)}")
                else:
                    await self._ask(random)
            except ResourceExhausted:  # until a lost rank is replaced
                self.counts["refused"] += 1
            except Unavailable:
                if not self.may_lose_service:
                    raise
                return

    async def _ask(self, random: Random) -> None:
        known = random.choice([one for one in self._reference.known if one.context != VISITOR])
        leave_after = random.randrange(1, NEW) if random.random() < 0.25 else NEW
        found = await answer(self._client, known, self.counts, leave_after)
        check(found, known, leave_after)
        self.counts["left" if leave_after < NEW else "streams"] += 1
        self._begun.set()

    async def _ingest_and_delete(self, name: str) -> None:
        """Ingests a new document, queries it and deletes it."""
        try:
            self.unsure.add(name)
            await self._client.ingest(name, self._reference.documents[VISITOR])
            self.unsure.remove(name)
            self.made.add(name)
            for known in self._reference.asks(VISITOR):
                check(await answer(self._client, replace(known, context=name), self.counts), known)
        finally:
            with suppress(LongleafError):
                self.unsure.add(name)
                await self._client.delete_context(name)
                self.unsure.remove(name)
                self.deleted.add(name)
                self.made.discard(name)
        self.counts["ingests"] += 1
