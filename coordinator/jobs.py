"""Jobs: what clients wait for. A job reads tokens into a segment of its own; a sequence then also answers."""

from array import array
from collections.abc import Sequence as TokenIds

from coordinator.blocks import Placer, Reservation
from coordinator.events import Prompt
from coordinator.paths import Path, Segment
from longleaf.messages import UNCHANGED, ContextSettings
from longleaf.runs import Run
from longleaf.step import Prefill, Row, Seen


class Job:
    """Tokens to read after a path of sealed segments. The first `num_prefill` of them go through chunks.

    `segment` and `reservation` are None while the job waits. `num_read` counts the tokens whose keys and values exist.
    """

    def __init__(self, job_id: int, path: Path, token_ids: TokenIds[int], num_prefill: int) -> None:
        self.id = job_id
        self.owner = job_id
        """Id of the job that the client waits for: other samples of it have ids of their own."""
        self.path = path
        self.start = path.end
        """Position of the first of token_ids."""
        self.token_ids = array("I", token_ids)
        self.num_prefill = num_prefill
        self.num_blocks = 0
        """Blocks that the job takes by its end, without those of its path, if nothing else is held of its tokens."""
        self.num_tails = 0
        """Answers that the job will have at a time, each in a segment of its own."""
        self.num_read = 0
        self.segment: Segment | None = None
        self.reservation: Reservation | None = None
        self._path_ids: tuple[int, ...] = ()

    @property
    def is_prefilling(self) -> bool:
        return self.num_read < self.num_prefill

    def begin(self, segment: Segment, reservation: Reservation) -> None:
        self.segment, self.reservation = segment, reservation
        self._path_ids = segment.path.ids

    def _active(self) -> tuple[Segment, Reservation]:
        assert self.segment is not None
        assert self.reservation is not None
        return self.segment, self.reservation

    def next_chunk(self, placer: Placer, chunk_size: int) -> Prefill:
        """Places the next chunk and says what the ranks must do."""
        segment, reservation = self._active()
        stop = min(self.num_read + chunk_size, self.num_prefill)
        token_ids = tuple(self.token_ids[self.num_read : stop])
        start, turn = segment.end, self.num_read // chunk_size
        pieces = placer.place_chunk(start, start + len(token_ids), turn, reservation)
        segment.extend(token_ids, pieces)
        return Prefill(self._path_ids, start, token_ids, pieces)

    def _grow(self, placer: Placer, token_ids: TokenIds[int]) -> tuple[Run, ...]:
        segment, reservation = self._active()
        last = segment.runs[-1] if segment.runs else None
        runs = placer.grow(last, segment.end, len(token_ids), reservation)
        segment.extend(token_ids, runs)
        return runs


class Ingest(Job):
    """A document on its way into context `context`."""

    def __init__(
        self,
        job_id: int,
        path: Path,
        token_ids: TokenIds[int],
        context: str,
        settings: ContextSettings = UNCHANGED,
    ) -> None:
        super().__init__(job_id, path, token_ids, len(token_ids))
        self.context = context
        self.settings = settings
        """Of the context that is created."""


class Sequence(Job):
    """One live generation: at first, while the prompt is read, for all its samples, then for one of them."""

    def __init__(self, job_id: int, path: Path, prompt: Prompt, num_prefill: int) -> None:
        super().__init__(job_id, path, prompt.token_ids, num_prefill)
        self.prompt = prompt
        self.sampling = prompt.sampling
        self.end_tokens = frozenset[int]() if prompt.sampling.ignore_end_token else prompt.end_tokens
        self.num_tails = prompt.num_samples
        self.sample = 0
        self.num_cached = path.end
        """Tokens of the path and the prompt that were held before."""
        self.num_generated = 0
        self.last_token = -1

    def reuse(self, path: Path, num_prefill: int) -> None:
        """Goes on after `path`, which holds the beginning of a plain prompt."""
        assert self.start == 0
        self.path, self.num_prefill = path, num_prefill
        self.num_read = self.num_cached = path.end

    def answer(self, segment: Segment) -> None:
        """Goes on in `segment`, which continues the one that the prompt was read into."""
        assert self.reservation is not None
        self.path = segment.before
        self.begin(segment, self.reservation)

    def fan_out(self) -> list["Sequence"]:
        """The other samples, which share what was read. Their reservations are theirs; segments they lack."""
        assert self.reservation is not None
        num_blocks, num_tails, self.num_tails = self.reservation.left // self.num_tails, self.num_tails, 1
        samples: list[Sequence] = []
        for i in range(1, num_tails):
            other = Sequence(self.id + i, self.path, self.prompt, self.num_prefill)
            other.owner, other.sample, other.num_tails = self.id, i, 1
            other.start, other.num_read, other.num_cached = self.start, self.num_read, self.num_cached
            other.sampling = self.sampling.of_sample(i)
            other.reservation = self.reservation.split(num_blocks)
            samples.append(other)
        return samples

    @property
    def num_prompt(self) -> int:
        """Tokens of the context and the prompt."""
        return self.start + len(self.token_ids)

    def next_row(self, placer: Placer) -> Row:
        """Places the tokens of the next step: the rest of the prompt, or the token that was sampled last."""
        segment, _ = self._active()
        start, is_first = segment.end, self.num_generated == 0
        token_ids = tuple(self.token_ids[self.num_read :]) if is_first else (self.last_token,)
        runs = self._grow(placer, token_ids)
        sent = token_ids if is_first else ()
        seen = self._seen() if sent else None
        return Row(self.id, self._path_ids, start, sent, runs, self.sampling, self.num_generated, seen)

    def _seen(self) -> Seen | None:
        """What rank 0 cannot know of the tokens that penalties count."""
        if not self.sampling.has_penalties:
            return None
        if self.sampling.repetition_penalty == 1.0:
            return Seen((), ())
        return Seen(tuple({*self.path.token_ids(), *self.token_ids}), ())
