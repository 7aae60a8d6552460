"""Segments, and the contexts that are made of them."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET

from coordinator.blocks import Placer
from longleaf.errors import InvalidArgument, NotFound
from longleaf.messages import UNCHANGED, ContextSettings
from longleaf.runs import Run

MAX_TIME = 253402300799
"""The last second of the year 9999."""


class Segment:
    """Tokens from position `start` on, and the runs that hold them. Grows until it is sealed."""

    def __init__(self, segment_id: int, start: int) -> None:
        self.id = segment_id
        self.start = start
        self.token_ids = array("I")
        self.runs: list[Run] = []
        self.num_references = 1
        self.is_sealed = False

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return sum(len(run.blocks) for run in self.runs)

    def extend(self, token_ids: Sequence[int], runs: Sequence[Run]) -> None:
        """Adds tokens and the runs that hold them; a first run with a known start is the last one, grown."""
        assert runs
        assert not self.is_sealed
        if self.runs and self.runs[-1].start == runs[0].start:
            self.runs.pop()
        self.runs.extend(runs)
        self.token_ids.extend(token_ids)

    def check(self) -> None:
        """The runs cover the tokens, in order and without gaps."""
        ends = [self.start, *(run.end for run in self.runs)]
        assert [run.start for run in self.runs] == ends[:-1]
        assert ends[-1] == self.end
        assert self.num_references > 0
        assert all(len(run) > 0 for run in self.runs)


class Segments:
    """All segments that anybody refers to. The last reference that goes frees the blocks."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._by_id: dict[int, Segment] = {}
        self._next_id = 0
        self._forgotten: list[int] = []

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_id.values())

    def create(self, start: int) -> Segment:
        """A new, growing segment with one reference: the caller's."""
        segment = Segment(self._next_id, start)
        self._by_id[segment.id] = segment
        self._next_id += 1
        return segment

    def retain(self, path: Iterable[Segment]) -> None:
        for segment in path:
            segment.num_references += 1

    def release(self, path: Iterable[Segment]) -> None:
        """Drops one reference of each; what nobody refers to is freed and will be forgotten by the ranks."""
        for segment in path:
            segment.num_references -= 1
            if segment.num_references == 0:
                del self._by_id[segment.id]
                self._placer.free(segment.runs)
                # A segment without runs was never in a plan, so no rank knows it.
                self._forgotten += [segment.id] if segment.runs else []

    def take_forgotten(self) -> tuple[int, ...]:
        """Ids for the next plan's release_segments; each is given once."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    def check(self) -> None:
        for segment in self._by_id.values():
            segment.check()


class Context:
    """A named path of sealed segments. Times in seconds since the epoch."""

    def __init__(self, context_id: str, now: float) -> None:
        self.id = context_id
        self.path: tuple[Segment, ...] = ()
        self.created = now
        self.updated = now
        self.display_name = ""
        self.is_pinned = False
        self.expires: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.path[-1].end if self.path else 0

    def change(self, settings: ContextSettings, now: float) -> None:
        """Takes what is set."""
        if settings.display_name is not UNSET:
            self.display_name = settings.display_name
        if settings.is_pinned is not UNSET:
            self.is_pinned = settings.is_pinned
        if settings.expires is not UNSET:
            self.expires = settings.expires
        if settings.ttl is not UNSET:
            self.expires = now + settings.ttl

    def shares(self, world_size: int) -> list[int]:
        """Tokens held by each rank."""
        held = [0] * world_size
        for run in (run for segment in self.path for run in segment.runs):
            held[run.rank] += len(run)
        return held

    def check(self) -> None:
        """Segments are sealed and follow one another from position 0 on."""
        ends = [0, *(segment.end for segment in self.path)]
        assert [segment.start for segment in self.path] == ends[:-1]
        assert self.path
        assert all(segment.is_sealed for segment in self.path)


def check_settings(settings: ContextSettings, now: float, parent: str) -> None:
    """Raises InvalidArgument for a time that has passed, or that a date cannot tell; `parent` carries the settings."""
    if settings.expires is not UNSET and settings.expires is not None and settings.expires <= now:
        raise InvalidArgument(f"{parent}.expire_time", f"passed {now - settings.expires:.0f} seconds ago")
    if settings.ttl is not UNSET and now + settings.ttl > MAX_TIME:
        raise InvalidArgument(f"{parent}.ttl", f"{settings.ttl:g} seconds end after the year 9999")


class Contexts:
    """The contexts by id. Each holds one reference to each segment of its path."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._by_id: dict[str, Context] = {}
        self.next_expiry: float | None = None
        """When the next context expires; None while none does."""

    def __contains__(self, context_id: str) -> bool:
        return context_id in self._by_id

    def get(self, context_id: str) -> Context:
        """Raises NotFound."""
        if context_id not in self._by_id:
            raise NotFound(f"contexts/{context_id}")
        return self._by_id[context_id]

    def list(self) -> list[Context]:
        """Sorted by id."""
        return [context for _, context in sorted(self._by_id.items())]

    def append(self, context_id: str, segment: Segment, now: float, settings: ContextSettings = UNCHANGED) -> None:
        """Seals `segment` and makes it the end of `context_id`, which is created with `settings` when it is new. Takes
        over the caller's reference."""
        segment.is_sealed = True
        context = self._by_id.setdefault(context_id, Context(context_id, now))
        assert segment.start == context.num_tokens
        context.path += (segment,)
        context.updated = now
        self.change(context_id, settings, now)

    def change(self, context_id: str, settings: ContextSettings, now: float) -> Context:
        """Raises NotFound."""
        context = self.get(context_id)
        context.change(settings, now)
        self._find_next_expiry()
        return context

    def _find_next_expiry(self) -> None:
        times = (c.expires for c in self._by_id.values() if c.expires is not None and not c.is_pinned)
        self.next_expiry = min(times, default=None)

    def expired(self, now: float) -> tuple[str, ...]:
        """Ids of the contexts whose time has passed."""
        if self.next_expiry is None or now < self.next_expiry:
            return ()
        dated = ((c.id, c.expires) for c in self._by_id.values() if not c.is_pinned)
        return tuple(context_id for context_id, expires in dated if expires is not None and expires <= now)

    def delete(self, context_id: str) -> None:
        """Raises NotFound. Sequences that run on the context keep its segments until they end."""
        path = self.get(context_id).path
        del self._by_id[context_id]
        self._segments.release(path)
        self._find_next_expiry()

    def check(self) -> None:
        for context in self._by_id.values():
            context.check()
