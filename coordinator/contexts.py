"""Segments, and the contexts that are made of them."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from coordinator.blocks import Placer
from longleaf.errors import NotFound
from longleaf.runs import Run


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

    def fill(self, position: int, token_id: int) -> None:
        """Tells the id of a token that was placed before it was known."""
        self.token_ids[position - self.start] = token_id

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

    def tokens_by_rank(self) -> list[int]:
        """Tokens whose keys and values each rank holds."""
        held = [0] * len(self._placer.pools)
        for run in (run for segment in self for run in segment.runs):
            held[run.rank] += len(run)
        return held

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

    @property
    def num_tokens(self) -> int:
        return self.path[-1].end if self.path else 0

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


class Contexts:
    """The contexts by id. Each holds one reference to each segment of its path."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._by_id: dict[str, Context] = {}

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

    def append(self, context_id: str, segment: Segment, now: float) -> None:
        """Seals `segment` and makes it the end of `context_id`, which is created when it is new. Takes over the
        caller's reference."""
        segment.is_sealed = True
        context = self._by_id.setdefault(context_id, Context(context_id, now))
        assert segment.start == context.num_tokens
        context.path += (segment,)
        context.updated = now

    def delete(self, context_id: str) -> None:
        """Raises NotFound. Sequences that run on the context keep its segments until they end."""
        path = self.get(context_id).path
        del self._by_id[context_id]
        self._segments.release(path)

    def check(self) -> None:
        for context in self._by_id.values():
            context.check()
