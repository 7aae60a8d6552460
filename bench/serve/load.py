"""An open loop of generations: requests arrive at their own times, however far behind the service is."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from longleaf.client import AsyncClient
from longleaf.errors import LongleafError, ResourceExhausted
from longleaf.types import Delta, Finished


@dataclass(frozen=True, slots=True)
class Request:
    """A request at `at` seconds after the start: token ids, with a context or without."""

    at: float
    context: str | None
    token_ids: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class Answer:
    """One request's fate. Times in seconds; arrivals are those of the plan, so a late start counts as waiting."""

    arrived: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list[float])
    """When each delta came."""
    num_tokens: int = 0
    ended: float = 0.0
    error: str = ""
    """Empty, `refused`, or the kind of error."""

    @property
    def first_token(self) -> float:
        """From the arrival to the first delta."""
        return self.times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Between deltas, as a reader sees them. A delta has several tokens where a character waited for its end."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def is_good(self, max_first_token: float, max_gap: float) -> bool:
        """Whether it was answered with no more than these, the gap in the mean over tokens."""
        if self.error or self.first_token > max_first_token:
            return False
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1) <= max_gap


class Documents:
    """Random token ids: how long a step takes does not depend on them."""

    def __init__(self, seed: str, vocabulary_size: int) -> None:
        self._rng = random.Random(seed)
        self._vocabulary_size = vocabulary_size

    def make(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self._vocabulary_size), k=num_tokens))


def poisson(rng: random.Random, rate: float, duration: float) -> list[float]:
    """Arrival times in [0, duration), `rate` per second in the mean, independent of each other."""
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < duration:
        times.append(at)
        at += rng.expovariate(rate)
    return times


async def run(client: AsyncClient, plan: Sequence[Request], timeout: float) -> list[Answer]:
    """Sends each request at its time, and waits for all; a request is cancelled after `timeout` seconds."""
    begin = time.perf_counter()
    return list(await asyncio.gather(*(_ask(client, request, begin, timeout) for request in plan)))


async def _ask(client: AsyncClient, request: Request, begin: float, timeout: float) -> Answer:
    answer = Answer(arrived=begin + request.at)
    await asyncio.sleep(answer.arrived - time.perf_counter())
    answer.sent = time.perf_counter()
    try:
        await _read(client, request, answer, timeout)
    except ResourceExhausted:
        answer.error = "refused"
    except LongleafError as error:
        answer.error = type(error).__name__
    answer.ended = time.perf_counter()
    return answer


async def _read(client: AsyncClient, request: Request, answer: Answer, timeout: float) -> None:
    options = {"max_tokens": request.num_tokens, "ignore_end_token": True}
    last = None
    async for last in client.generate(request.token_ids, context=request.context, timeout=timeout, **options):
        if isinstance(last, Delta):
            if last.index != answer.num_tokens:
                raise LongleafError(f"token {last.index} follows {answer.num_tokens} tokens")
            answer.times.append(time.perf_counter())
            answer.num_tokens += len(last.token_ids)
    if not isinstance(last, Finished) or answer.num_tokens != request.num_tokens:
        raise LongleafError(f"the answer ended after {answer.num_tokens} of {request.num_tokens} tokens")
