"""Contexts: names for paths of sealed segments."""

from collections import defaultdict
from collections.abc import Container, Sequence
from itertools import islice
from typing import Any, Self

from msgspec import UNSET
from msgspec.structs import asdict, replace

from coordinator.expiry_heap import ExpiryHeap
from coordinator.kv_cache.positions import UNLIMITED
from coordinator.kv_cache.segment_placement import SegmentPlacement, SegmentPlacements
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.kv_cache.totals import Totals
from longleaf.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from longleaf.formatting import human_number
from longleaf.positions import Rope
from longleaf.storage.context_record import ContextRecord, sound_ends
from longleaf.tenants import tenant_of
from longleaf.types import UNCHANGED, ContextSettings

LAST_ENDS = 4
"""Number of document ends of a context at which windows are held. It bounds the blocks that repeated appends take."""
NO_SEGMENT = -1
"""The last segment of a context without tokens."""
RETRY_SECONDS = 1.0
"""Retry delay for a request that waits for a recovery."""


class NamedContext:
    """A context in memory: its record, and its path of sealed segments.

    Where every rank holds the last keys of windowed layers, the windows before `ends` are held. Only at these positions
    is a fork guaranteed to be possible.
    """

    def __init__(self, record: ContextRecord, path: TokenPath) -> None:
        self.record = record
        """Its state, as it is stored. Times in seconds since the epoch."""
        self.path = path
        self.last_use = 0
        """Sequence number of its last use, counted over all contexts."""
        self.is_evicted = False
        """The context is evicted: it needs no keys for now. Segments that nothing else needs are evicted as well."""

    @classmethod
    def of(cls, record: ContextRecord, path: TokenPath) -> Self:
        """A stored context. Invalid ends, which early versions imported, are replaced by the end of the context."""
        ends = sound_ends(record.ends, record.num_tokens) or (record.num_tokens,)
        return cls(replace(record, ends=ends[-LAST_ENDS:]), path)

    @classmethod
    def new(cls, context_id: str, now: float, capacity: int) -> Self:
        """A context without tokens."""
        record = ContextRecord(
            id=context_id,
            segment=NO_SEGMENT,
            num_tokens=0,
            ends=(),
            capacity=capacity,
            created=now,
            updated=now,
            last_used=now,
        )
        return cls(record, TokenPath())

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def num_tokens(self) -> int:
        return self.path.end

    @property
    def ends(self) -> tuple[int, ...]:
        """Positions at which the last documents ended and at which the context was forked. The last entry is the
        context's end."""
        return self.record.ends

    @property
    def capacity(self) -> int:
        """Maximum number of positions, for which the context's rope was chosen. It never changes."""
        return self.record.capacity

    @property
    def settings(self) -> ContextSettings:
        """The settings chosen by the client, except for the capacity."""
        record = self.record
        return ContextSettings(display_name=record.display_name, is_pinned=record.is_pinned, expires=record.expires)

    @property
    def rope(self) -> Rope:
        """The rotation of its keys."""
        return self.path.segments[0].rope

    def record_hit(self, now: float) -> None:
        """Record a query at `now`."""
        self.record = replace(self.record, last_used=now, num_hits=self.record.num_hits + 1)

    def cut(self, context_id: str, num_tokens: int, now: float) -> "NamedContext":
        """A new context of its first tokens."""
        path, ends = self.path.cut(num_tokens), (*(end for end in self.ends if end < num_tokens), num_tokens)
        forked = NamedContext.new(context_id, now, self.capacity)
        forked._move(path, ends[-LAST_ENDS:])
        return forked

    def append(self, segment: Segment, now: float, settings: ContextSettings, upload_id: str) -> tuple[int, ...]:
        """Appends the segment of a document, and applies the settings of its ingest. Returns the ends whose windows are
        no longer held."""
        ends = (*self.ends, segment.end)
        self._move(segment.path, ends[-LAST_ENDS:], updated=now, upload_id=upload_id)
        self.change(settings, now)
        return ends[:-LAST_ENDS]

    def _move(self, path: TokenPath, ends: tuple[int, ...], **changes: Any) -> None:
        self.path, last = path, path.segments[-1].id
        self.record = replace(self.record, segment=last, num_tokens=path.end, ends=ends, **changes)

    def change(self, settings: ContextSettings, now: float) -> None:
        """Applies the fields that are set, except for the capacity."""
        changes = {name: value for name, value in asdict(settings).items() if value is not UNSET and name != "capacity"}
        if "ttl" in changes:
            changes["expires"] = now + changes.pop("ttl")
        self.record = replace(self.record, **changes)

    def keep_segment_ends(self) -> None:
        """Drops ends within segments, where no recurrent states are held."""
        segment_ends = {end for _, _, end in self.path.parts()}
        self.record = replace(self.record, ends=tuple(end for end in self.ends if end in segment_ends))

    def audit(self, placements: SegmentPlacements) -> None:
        """Asserts that there are tokens, that all of them are in sealed segments, and that the context can continue at
        its ends."""
        for end in self.ends:
            placements.audit(self.path.cut(end))
        assert self.ends[-1] == self.num_tokens == self.record.num_tokens
        assert self.record.segment == self.path.segments[-1].id
        assert len(self.ends) <= LAST_ENDS
        assert self.path.segments
        assert self.num_tokens <= self.capacity
        assert all(segment.is_sealed for segment in self.path.segments)


class ContextTable:
    """Contexts by id. Each context holds one reference to each segment of its path."""

    def __init__(self, segments: SegmentStore) -> None:
        self._segments = segments
        self._by_id: dict[str, NamedContext] = {}
        self._tenants = defaultdict[str, Totals](Totals)
        self._num_uses = 0
        self._expiries = ExpiryHeap[str]()
        """Expiry times of contexts that are not pinned, in seconds since the epoch."""

    def __contains__(self, context_id: str) -> bool:
        return context_id in self._by_id

    @property
    def count(self) -> int:
        return len(self._by_id)

    def get(self, context_id: str) -> NamedContext:
        """Raises NotFound."""
        if context_id not in self._by_id:
            raise NotFound(f"contexts/{context_id}")
        return self._by_id[context_id]

    def find(self, context_id: str | None) -> NamedContext | None:
        """The context with that id, or None."""
        return None if context_id is None else self._by_id.get(context_id)

    def mark_used(self, context: NamedContext) -> None:
        """Marks a context as the most recently used: it is queried, appended to, or forked."""
        self._num_uses += 1
        context.last_use = self._num_uses

    def list(self) -> list[NamedContext]:
        """All contexts, sorted by id."""
        return [self._by_id[context_id] for context_id in sorted(self._by_id)]

    def of_tenant(self, tenant: str, after: str = "", limit: int | None = None) -> Sequence[NamedContext]:
        """Contexts of a tenant, sorted by id, that come after the id `after`; at most `limit`."""
        return [self._by_id[context_id] for context_id in islice(self.totals(tenant).ids(after), limit)]

    def totals(self, tenant: str) -> Totals:
        """Totals over a tenant's contexts."""
        return self._tenants[tenant] if tenant in self._tenants else Totals()

    def _add(self, context: NamedContext) -> None:
        self._by_id[context.id] = context
        self._tenants[tenant_of(context.id)].add(context.id, context.num_tokens, context.path.segments)

    def _remove(self, context: NamedContext) -> None:
        del self._by_id[context.id]
        totals = self._tenants[tenant_of(context.id)]
        totals.remove(context.id, context.num_tokens, context.path.segments)
        if not totals.count:
            del self._tenants[tenant_of(context.id)]

    def append(
        self,
        context_id: str,
        segment: Segment,
        now: float,
        settings: ContextSettings = UNCHANGED,
        capacity: int = UNLIMITED,
        upload_id: str = "",
    ) -> None:
        """Seals `segment` and appends it to `context_id`. A new context is created with `settings` and `capacity`. The
        windows of all but its last LAST_ENDS ends are released."""
        self._segments.seal(segment)
        if context_id not in self:
            self._add(NamedContext.new(context_id, now, capacity))
        context = self._by_id[context_id]
        assert segment.before == context.path
        self._segments.retain(segment.path, context.path)
        self._tenants[tenant_of(context_id)].grow(segment.end - context.num_tokens, (segment,))
        for end in context.append(segment, now, settings, upload_id):
            self._segments.unpin_windows(context.path, end)
        self.mark_used(context)
        self._update_expiry(context)

    def change(self, context_id: str, settings: ContextSettings, now: float) -> NamedContext:
        """Raises NotFound."""
        context = self.get(context_id)
        context.change(settings, now)
        self._update_expiry(context)
        return context

    def _update_expiry(self, context: NamedContext) -> None:
        self._expiries.add(context.id, context.record.expiry)

    def restore(self, context: NamedContext, settings: ContextSettings) -> None:
        """Reverts a change, unless the context has been deleted since."""
        if self.find(context.id) is context:
            self.change(context.id, settings, context.record.updated)

    @property
    def next_expiry(self) -> float | None:
        """Time at which the next context expires, or None."""
        return self._expiries.next

    def expired(self, now: float) -> tuple[str, ...]:
        """Ids of the contexts that have expired."""
        return tuple(self._expiries.passed(now))

    def fork(self, source: str, context_id: str, num_tokens: int | None, now: float) -> NamedContext:
        """Creates a context from the first `num_tokens` tokens of another, by default all. Copies no keys.

        Raises NotFound, AlreadyExists, InvalidArgument naming token_count, or Unavailable.
        """
        parent = self.get(source)
        if context_id in self:
            raise AlreadyExists(f"contexts/{context_id}")
        num_tokens = parent.num_tokens if num_tokens is None else num_tokens
        if not 1 <= num_tokens <= parent.num_tokens:
            limit = f"between 1 and {parent.num_tokens:,}, the tokens of contexts/{source}"
            raise InvalidArgument("token_count", f"{num_tokens:,} is not {limit}")
        self._check_seam(parent, num_tokens)
        context = parent.cut(context_id, num_tokens, now)
        self._register(context)
        if self._segments.placements.evicted(context.path):
            self.evict(context)
        self.mark_used(parent)
        self.mark_used(context)
        return context

    def _register(self, context: NamedContext) -> None:
        """Adds a context, and its references to its path."""
        self._segments.retain(context.path)
        for end in context.ends[:-1]:
            self._segments.pin_windows(context.path, end)
        self._add(context)

    # --- eviction ---

    def adopt(self, context: NamedContext) -> None:
        """Adds a restored context. Its segments are adopted already, and none of their keys are held."""
        if (windows := self._segments.placements.windows) is not None and windows.is_state:
            context.keep_segment_ends()
        self._register(context)
        self.evict(context)
        self.mark_used(context)
        self._update_expiry(context)

    def evict(self, context: NamedContext) -> None:
        """Evicts a context: it needs no keys for now. Segments that nothing else needs are evicted."""
        assert not context.is_evicted
        context.is_evicted = True
        self._segments.release_to_idle(context.path)

    def bound(self, in_use: Container[str | None]) -> "list[NamedContext]":
        """Contexts that cannot be evicted while the contexts `in_use` are in use: those, pinned contexts, and, where
        windows are replicated, all contexts that begin with the same segment as one of them, because the segments
        before a segment must be held or be reloaded with it."""
        awake = [context for context in self._by_id.values() if not context.is_evicted]
        found = [context for context in awake if context.record.is_pinned or context.id in in_use]
        if self._segments.placements.windows is None:
            return found
        roots = {context.path.segments[0] for context in found}
        return [context for context in awake if context.path.segments[0] in roots]

    def activate(self, context: NamedContext) -> Sequence[SegmentPlacement]:
        """Activates a context. Returns the evicted segments of its path, in order; the caller must reload them with
        `begin_reload`."""
        if context.is_evicted:
            context.is_evicted = False
            self._segments.activate(context.path)
        return self._segments.placements.evicted(context.path)

    def place_before(self, context_id: str, position: int) -> int:
        """The last position of a context, not after `position`, at which it can be forked; 0 if there is none. Raises
        NotFound."""
        context, placements = self.get(context_id), self._segments.placements
        below, _ = placements.seams(context.path, min(position, placements.whole_end(context.path)))
        return max([below, *(end for end in context.ends if end <= position)])

    def _check_seam(self, context: NamedContext, position: int) -> None:
        """Raises InvalidArgument where windowed layers lack the keys to continue, and Unavailable where these keys are
        held only during a recovery."""
        placements, path = self._segments.placements, context.path
        if (windows := placements.windows) is None or position in context.ends:
            return  # valid even while the windows of that end are being recomputed
        below, above = placements.seams(path, position)
        if below == above:
            if position > placements.whole_end(path) and any(path.seen(position, windows)):
                message = f"contexts/{context.id} is being recomputed after a loss; it cannot be cut at {position:,}"
                raise Unavailable(message, RETRY_SECONDS)
            return
        who = "a model with recurrent states" if windows.is_state else "--window-keys replicated"
        why = f"with {who}, a context can be forked only where one of its"
        where = f"last {LAST_ENDS} documents ended (at {_one_of(context.ends)})"
        sections = " or a section begins" if windows.stride else ""
        nearest = _one_of((below, above) if below else (above,))
        remedy = "" if windows.is_state else "; with --window-keys sharded, any position is allowed"
        raise InvalidArgument("token_count", f"{position:,}: {why} {where}{sections}, nearest at {nearest}{remedy}")

    def delete(self, context_id: str) -> None:
        """Raises NotFound. Running sequences on the context keep its segments until they end."""
        context = self.get(context_id)
        if context.is_evicted:
            self._segments.activate(context.path)
        self._remove(context)
        for end in context.ends[:-1]:
            self._segments.unpin_windows(context.path, end)
        self._segments.release(context.path)
        self._segments.drop_orphans(context.path)
        self._expiries.discard(context_id)

    def audit(self) -> None:
        tenants = defaultdict[str, Totals](Totals)
        for context in self._by_id.values():
            tenants[tenant_of(context.id)].add(context.id, context.num_tokens, context.path.segments)
        assert {tenant: each.state() for tenant, each in tenants.items()} == {
            tenant: each.state() for tenant, each in self._tenants.items()
        }
        self._expiries.audit()
        contexts = self._by_id.values()
        assert set(self._expiries) == {context.id for context in contexts if context.record.expiry is not None}
        for context in contexts:
            context.audit(self._segments.placements)
            assert context.is_evicted or not self._segments.placements[context.path.segments[-1]].is_idle


def _one_of(positions: tuple[int, ...]) -> str:
    """Formats alternatives, for example "3, 5 or 8"."""
    *others, last = map(human_number, positions)
    return f"{', '.join(others)} or {last}" if others else last
