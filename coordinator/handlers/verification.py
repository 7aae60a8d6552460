"""Verifies the running cluster: compares a short prompt over all ranks with plain attention on one rank.

The prompt is queued, prefilled and answered like any other, concurrently with running requests. Only plain attention
blocks all streams, for the time in which one rank reads the prompt, once or twice. Therefore the prompt is short, and
one verification runs at a time.
"""

import random
import time
from collections.abc import Callable, Generator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from coordinator import engine_messages
from coordinator.handlers.prompt_encoder import check_ids
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import InvalidArgument, NotFinite, ResourceExhausted, Unavailable
from longleaf.rank_protocol.verdict import judge
from longleaf.sampling import SamplingParams
from longleaf.types import Cluster, Verification, Verify

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine

MAX_PROMPT = 1024
MIN_DEFAULT_PROMPT = 256
MAX_ANSWER = 64
DEFAULT_ANSWER = 8
MAX_TEXT_BYTES = 1 << 16
RETRY_SECONDS = 1.0


class VerificationRunner:
    """Runs verifications on an engine, one at a time. `clock` is the engine's, in seconds."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        threads: TokenizerPool,
        cluster: Callable[[], Cluster],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._threads = threads
        self._cluster = cluster
        self._clock = clock
        self._is_running = False

    async def run(self, request: Verify, seconds: float | None = None) -> Verification:
        """Runs one verification. The client waits `seconds`, if given.

        Raises InvalidArgument, ResourceExhausted, DeadlineExceeded, Unavailable or RankLost.
        """
        deadline = None if seconds is None else self._clock() + seconds
        max_tokens = _within("max_token_count", request.max_tokens, DEFAULT_ANSWER, MAX_ANSWER)
        with self._exclusive():
            prompt = engine_messages.Prompt(
                context=None,
                token_ids=await self._prompt_ids(request, max_tokens),
                sampling=SamplingParams(max_tokens=max_tokens, ignore_end_token=True),
                scheduling=engine_messages.SchedulingParams(client=request.client, deadline=deadline),
                is_compared=True,
                max_draft_tokens=self._engine.max_draft_tokens,
            )
            comparison = judge(await self._compare(prompt))
        return replace(comparison, prompt_tokens=len(prompt.token_ids), world_size=self._cluster().world_size)

    @contextmanager
    def _exclusive(self) -> Generator[None, None, None]:
        if self._is_running:
            raise ResourceExhausted(
                "verification",
                "another verification is running; only one may run, because it blocks all streams",
                RETRY_SECONDS,
            )
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    async def _prompt_ids(self, request: Verify, max_tokens: int) -> tuple[int, ...]:
        size = self._tokenizer.vocabulary_size
        if request.text is None:
            num_tokens = _within("prompt_token_count", request.num_tokens, self._usual_length(max_tokens), MAX_PROMPT)
            return tuple(random.Random(request.seed).choices(range(size), k=num_tokens))
        if request.num_tokens is not None:
            raise InvalidArgument("prompt_token_count", "requests random token ids, but a text is given")
        if len(request.text.encode()) > MAX_TEXT_BYTES:
            raise InvalidArgument("text", f"exceeds the limit of {MAX_TEXT_BYTES:,} bytes")
        encoder = self._tokenizer.plain_encoder(True)
        await self._threads.encode(encoder, request.text)
        if len(encoder.token_ids) > MAX_PROMPT:
            raise InvalidArgument("text", f"has {len(encoder.token_ids):,} tokens; the limit is {MAX_PROMPT:,}")
        return tuple(check_ids(encoder.token_ids, size, "text"))

    def _usual_length(self, max_tokens: int) -> int:
        """Tokens for at least one block on every rank, within the limits."""
        cluster = self._cluster()
        wanted = max(MIN_DEFAULT_PROMPT, cluster.world_size * cluster.block_size + 1)
        room = min(self._engine.max_positions, self._engine.total_tokens - cluster.block_size) - max_tokens
        return max(1, min(wanted, MAX_PROMPT, room))

    async def _compare(self, prompt: engine_messages.Prompt) -> Verification:
        try:
            async with aclosing(self._engine.submit(prompt)) as stream:
                async for event in stream:
                    if isinstance(event, engine_messages.Ended) and event.comparison is not None:
                        return event.comparison
        except NotFinite as error:
            return Verification(failure=str(error))
        raise Unavailable("the engine ended the stream before the ranks compared")


def _within(field: str, given: int | None, default: int, most: int) -> int:
    """Raises InvalidArgument naming `field` if the number is not between 1 and `most`."""
    value = default if given is None else given
    if not 1 <= value <= most:
        raise InvalidArgument(field, f"{value:,} is not between 1 and {most:,}")
    return value
