"""Forks of contexts, also at positions at which only a part of the source can be shared."""

from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from coordinator.auth.caller import CALLER, OWNER
from coordinator.auth.quotas import QuotaEnforcer
from coordinator.engine_messages import DocumentPart, DocumentPrompt, SchedulingParams
from longleaf.document_text import DocumentText
from longleaf.errors import LongleafError
from longleaf.tenants import tenant_of
from longleaf.types import UNCHANGED, Context, ContextSettings, ForkContext

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine


class ContextForks:
    """Forks the contexts of an engine, within the quotas."""

    def __init__(self, engine: "Engine", quotas: QuotaEnforcer) -> None:
        self._engine = engine
        self._quotas = quotas

    async def fork(self, request: ForkContext) -> Context:
        """With `recompute`, the tokens after the last position at which the source can be continued are appended to the
        fork as documents, and count as input. Until then the fork ends earlier. If that fails, the fork is deleted.

        Raises NotFound, AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable, RankLost or StorageUnavailable.
        """
        engine, source = self._engine, request.source
        resident = engine.get_context(source).tokens
        end = resident if request.tokens is None else request.tokens
        self._quotas.check_context(1, min(resident, end))
        place = engine.place_before(source, end) if request.recompute and 1 <= end <= resident else end
        if place == end:
            return await engine.fork_context(source, request.context, request.tokens)
        self._quotas.check_rate_in()
        with self._quotas.reserve_contexts(1, end):
            return await self._append(request, place, end)

    async def _append(self, request: ForkContext, place: int, end: int) -> Context:
        """Forks at `place`, and appends the tokens before `end`."""
        engine, name = self._engine, request.context
        parts = list(parts_between(engine.text_parts(request.source), place, end))
        settings = ContextSettings(capacity=engine.get_context(request.source).positions.capacity)
        scheduling = SchedulingParams(tenant=tenant_of(name), is_alone=CALLER.get(OWNER).is_alone)
        if place:
            await engine.fork_context(request.source, name, place)
        made = engine.named(name) if place else None
        try:
            for token_ids, text in parts:
                document = DocumentPrompt(
                    context=name,
                    token_ids=token_ids,
                    append=made is not None,
                    settings=settings if made is None else UNCHANGED,
                    text=text,
                    scheduling=scheduling,
                )
                async with aclosing(engine.ingest(document)) as events:
                    self._quotas.charge_input(len(token_ids))
                    async for _ in events:
                        pass
                made = made or engine.named(name)
        except BaseException:
            with suppress(LongleafError):
                if made is not None and engine.named(name) is made:
                    await engine.delete_context(name)
            raise
        return replace(engine.get_context(name), recomputed_tokens=end - place)


def parts_between(
    parts: Sequence[DocumentPart], start: int, end: int
) -> Iterator[tuple[Sequence[int], DocumentText | None]]:
    """The token ids and the texts of a context from position `start` to `end`, by document. A document without its
    beginning has no text."""
    position = 0
    for part in parts:
        first, last = max(0, start - position), min(part.num_tokens, end - position)
        position += part.num_tokens
        if first < last:
            text = None if first else part.text
            is_whole = last == len(part.token_ids)
            yield part.token_ids[first:last], text if text is None or is_whole else text.cut(last)
