"""Requests to an engine, and its answers."""

from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Ended, Prompt, Tokens
from longleaf.sampling import Sampling
from longleaf.types import ContextSettings
from tests.support.golden.plain import NEW_TOKENS

Ids = tuple[int, ...]
MAX_TOKENS = 6
"""Of a prompt that is compared."""
CAPACITY = 4096
"""Capacity of contexts. Positions scaled by length then match `generate` on the whole prompt."""


async def answer(engine: Engine, prompt: Ids, context: str | None = None, num_new: int = NEW_TOKENS) -> Ids:
    sampling = Sampling(max_tokens=num_new, ignore_end_token=True)
    stream = engine.submit(Prompt(context=context, token_ids=prompt, sampling=sampling))
    return tuple([t async for event in stream if isinstance(event, Tokens) for t in event.token_ids])


async def ingest(engine: Engine, context: str, token_ids: Ids, capacity: int = CAPACITY) -> None:
    """Into a new context that may become long, or on the end of one."""
    is_new = context not in [view.id for view in engine.list_contexts()]
    settings = ContextSettings(capacity=capacity) if is_new else ContextSettings()
    _ = [
        event
        async for event in engine.ingest(
            DocumentPrompt(context=context, token_ids=token_ids, append=not is_new, settings=settings)
        )
    ]


async def ask(engine, prompt, num_samples=1):
    """Tokens by sample, and how many of the prompt's were held."""
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_end_token=True)
    stream = engine.submit(Prompt(context=None, token_ids=prompt, sampling=sampling, num_samples=num_samples))
    found: list[Ids] = [() for _ in range(num_samples)]
    cached: set[int] = set()
    async for event in stream:
        if isinstance(event, Tokens):
            found[event.sample] += event.token_ids
        if isinstance(event, Ended):
            cached.add(event.cached_tokens)
    return found, *cached


async def compare(engine, prompt, **claims):
    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_end_token=True)
    stream = engine.submit(Prompt(context=None, token_ids=prompt, sampling=sampling, is_compared=True, **claims))
    [comparison] = [event.comparison async for event in stream if isinstance(event, Ended)]
    return comparison
