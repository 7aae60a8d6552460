"""The contexts: names for paths of sealed segments."""

from coordinator.paths import Path, Segment
from coordinator.segments import Segments
from longleaf.errors import AlreadyExists, InvalidArgument, NotFound


class Context:
    """A named path of sealed segments. Times in seconds since the epoch."""

    def __init__(self, context_id: str, now: float, path: Path) -> None:
        self.id = context_id
        self.path = path
        self.created = now
        self.updated = now

    @property
    def num_tokens(self) -> int:
        return self.path.end

    def shares(self, world_size: int) -> list[int]:
        """Tokens held by each rank."""
        held = [0] * world_size
        for segment, _, end in self.path.parts():
            for run in segment.runs:
                held[run.rank] += max(0, min(run.end, end) - run.start)
        return held

    def check(self) -> None:
        """There are tokens, all of them in sealed segments."""
        self.path.check()
        assert self.path.segments
        assert all(segment.is_sealed for segment in self.path.segments)


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
        self._segments.seal(segment)
        context = self._by_id.setdefault(context_id, Context(context_id, now, Path()))
        assert segment.before == context.path
        context.path = segment.path
        context.updated = now

    def fork(self, source: str, context_id: str, num_tokens: int | None, now: float) -> Context:
        """A new context of the first `num_tokens` tokens of another, by default all. Copies nothing.

        Raises NotFound, AlreadyExists, or InvalidArgument naming token_count.
        """
        path = self.get(source).path
        if context_id in self:
            raise AlreadyExists(f"contexts/{context_id}")
        num_tokens = path.end if num_tokens is None else num_tokens
        if not 1 <= num_tokens <= path.end:
            limit = f"between 1 and {path.end}, the tokens of contexts/{source}"
            raise InvalidArgument("token_count", f"{num_tokens} is not {limit}")
        context = Context(context_id, now, path.cut(num_tokens))
        self._segments.retain(context.path.segments)
        self._by_id[context_id] = context
        return context

    def delete(self, context_id: str) -> None:
        """Raises NotFound. Sequences that run on the context keep its segments until they end."""
        path = self.get(context_id).path
        del self._by_id[context_id]
        self._segments.release(path.segments)

    def check(self) -> None:
        for context in self._by_id.values():
            context.check()
