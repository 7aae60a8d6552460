"""Jobs: what clients wait for. A job reads tokens into a segment of its own; a sequence then also answers."""

from array import array
from collections.abc import Sequence as TokenIds

from coordinator.blocks import Placer, Reservation
from coordinator.contexts import Segment
from coordinator.events import Prompt
from longleaf.messages import UNCHANGED, ContextSettings
from longleaf.runs import Run
from longleaf.step import Prefill, Row


class Job:
    """Tokens to read after a path of sealed segments. The first `num_prefill` of them go through chunks.

    `segment` and `reservation` are None while the job waits. `num_read` counts the tokens whose keys and values exist.
    """

    def __init__(self, job_id: int, path: tuple[Segment, ...], token_ids: TokenIds[int], num_prefill: int) -> None:
        self.id = job_id
        self.path = path
        self.token_ids = array("I", token_ids)
        self.num_prefill = num_prefill
        self.num_blocks = 0
        """Blocks that the job takes by its end, without those of its path."""
        self.num_read = 0
        self.segment: Segment | None = None
        self.reservation: Reservation | None = None
        self._path_ids: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.path[-1].end if self.path else 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_read < self.num_prefill

    def begin(self, segment: Segment, reservation: Reservation) -> None:
        self.segment, self.reservation = segment, reservation
        self._path_ids = (*(s.id for s in self.path), segment.id)

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
        path: tuple[Segment, ...],
        token_ids: TokenIds[int],
        context: str,
        settings: ContextSettings = UNCHANGED,
    ) -> None:
        super().__init__(job_id, path, token_ids, len(token_ids))
        self.context = context
        self.settings = settings
        """Of the context that is created."""


class Sequence(Job):
    """One live generation."""

    def __init__(self, job_id: int, path: tuple[Segment, ...], prompt: Prompt, num_prefill: int) -> None:
        super().__init__(job_id, path, prompt.token_ids, num_prefill)
        self.sampling = prompt.sampling
        self.end_tokens = frozenset[int]() if prompt.sampling.ignore_end_token else prompt.end_tokens
        self.num_generated = 0
        self.last_token = -1

    @property
    def num_prompt(self) -> int:
        """Tokens of the path and the prompt."""
        return self.start + len(self.token_ids)

    def next_row(self, placer: Placer) -> Row:
        """Places the tokens of the next step: the rest of the prompt, or the token that was sampled last."""
        segment, _ = self._active()
        start, is_first = segment.end, self.num_generated == 0
        token_ids = tuple(self.token_ids[self.num_read :]) if is_first else (self.last_token,)
        runs = self._grow(placer, token_ids)
        sent = token_ids if is_first else ()
        return Row(self.id, self._path_ids, start, sent, runs, self.sampling, self.num_generated)
