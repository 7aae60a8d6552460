"""Who reads what jobs say: the stream of each, and what it was told when."""

from collections.abc import Callable, Iterable, Mapping

from coordinator.engine.stream import Stream
from coordinator.engine.timings import Timings
from coordinator.events import Acknowledged, Ended, Failed, Outcome, Started
from longleaf.errors import LongleafError

POSITION_SECONDS = 1.0
"""How often those that wait are told that their place in the queue has changed."""


class Readers:
    """Open streams, by job. `clock` is the engine's, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_job: dict[int, tuple[Stream, Timings]] = {}
        self._has_new = False
        self._positions_told = 0.0

    def __len__(self) -> int:
        return len(self._by_job)

    def add(self, job_id: int, stream: Stream, num_samples: int) -> None:
        self._by_job[job_id] = (stream, Timings(self._clock(), num_samples))
        self._has_new = True

    def remove(self, job_id: int) -> None:
        """A job's reader has left."""
        del self._by_job[job_id]

    def publish(self, outcomes: Iterable[Outcome]) -> list[int]:
        """Tells the readers what happened; gives the jobs whose readers are behind."""
        now, behind = self._clock(), list[int]()
        for job_id, outcome in outcomes:
            if job_id not in self._by_job:
                continue  # cancelled
            stream, timings = self._by_job[job_id]
            match outcome:
                case LongleafError():
                    self.close(job_id, outcome)
                case Acknowledged():
                    self.close(job_id)
                case Failed(error):
                    stream.fail(error)
                    self.end_sample(job_id)
                case Ended():
                    stream.put(timings.fill(outcome, now))
                    self.end_sample(job_id)
                case _:
                    timings.take(outcome, now)
                    stream.put(outcome)
                    behind += [job_id] if stream.is_full else []
        return behind

    def tell_positions(self, positions: Callable[[], Mapping[int, Started]]) -> None:
        """Tells those that wait their place in the queue: at once when they come, changes once in a while."""
        now = self._clock()
        is_due = now - self._positions_told >= POSITION_SECONDS
        if not (is_due or self._has_new):
            return
        for job_id, started in positions().items():
            stream, timings = self._by_job[job_id]
            if timings.position is None or (is_due and timings.position != started.queue_position):
                timings.position = started.queue_position
                stream.put(started)
        self._has_new = False
        self._positions_told = now if is_due else self._positions_told

    def end_sample(self, job_id: int) -> None:
        """Ends the stream with the last of its samples."""
        _, timings = self._by_job[job_id]
        timings.num_open -= 1
        if timings.num_open == 0:
            self.close(job_id)

    def close(self, job_id: int, error: Exception | None = None) -> None:
        """Ends a job's stream, unless it has ended."""
        if job_id in self._by_job:
            stream, _ = self._by_job.pop(job_id)
            stream.close(error)

    def close_all(self, error: Exception) -> None:
        for job_id in list(self._by_job):
            self.close(job_id, error)
