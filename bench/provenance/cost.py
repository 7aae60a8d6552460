"""The additional cost of a token with sources. Neither side uses drafts, whose number would depend on the time."""

import random
from statistics import median

from bench.provenance.rows import Row
from longleaf.client import Client
from longleaf.types import Finished, Provenance

ANSWER_TOKENS = 64
CONTEXT = "cost"


def cost(client: Client, tokens: int, repeats: int) -> Row:
    """Milliseconds per token without and with, turn by turn, each first in every other one."""
    rng, size = random.Random(0), client.cluster().model.vocabulary_size
    client.ingest(CONTEXT, [rng.randrange(min(size, 256)) for _ in range(tokens)])
    turns: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for side in (0, 1) if turn % 2 else (1, 0):
            seconds = _seconds(client, Provenance() if side else None)
            if turn:  # the first one warms up
                turns[side].append(seconds)
    client.delete_context(CONTEXT)
    off, on = (median(side) * 1e3 for side in turns)
    each = [on / off - 1 for off, on in zip(*turns, strict=True)]
    row = {"tokens": tokens, "task": "cost", "method": "raw", "off_ms": round(off, 3), "on_ms": round(on, 3)}
    return row | {"more": round(on / off - 1, 4), "more_min": round(min(each), 4), "more_max": round(max(each), 4)}


def _seconds(client: Client, provenance: Provenance | None) -> float:
    """Per token, but for the first."""
    options = {"max_tokens": ANSWER_TOKENS, "ignore_end_token": True, "max_draft_tokens": 0}
    last = list(client.ask(CONTEXT, "?", provenance=provenance, **options))[-1]
    assert isinstance(last, Finished)
    return last.timings.decode_seconds / (last.usage.completion_tokens - 1)
