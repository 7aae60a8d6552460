"""The streams of open requests, and the times of their events."""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from coordinator.engine.stream import Stream
from coordinator.engine_messages import Acknowledged, Admitted, Ended, Event, Failed, Outcome, Sealed, Tokens
from longleaf.errors import LongleafError

POSITION_SECONDS = 1.0
"""The interval in seconds at which waiting requests are notified of a changed queue position."""


class StreamState:
    """A stream and the times of its events, in seconds of the engine's clock."""

    def __init__(self, stream: Stream, num_open: int, now: float) -> None:
        self.stream = stream
        self.num_open = num_open
        """Samples that have not ended."""
        self.position: int | None = None
        """The queue position that was published last."""
        self._submitted = now
        self._started: float | None = None
        self._first_token: float | None = None

    def publish(self, event: Event, now: float) -> None:
        """Publish an event and record the time of the first of its kind: a preempted request is admitted again."""
        match event:
            case Admitted():
                self._started = now if self._started is None else self._started
                self.position = None
            case Tokens():
                self._first_token = now if self._first_token is None else self._first_token
            case Ended():
                event = self._timed(event, now)
            case _:
                pass
        self.stream.put(event)

    def _timed(self, ended: Ended, now: float) -> Ended:
        first = now if self._first_token is None else self._first_token
        return msgspec.structs.replace(
            ended,
            queue_seconds=(self._started or self._submitted) - self._submitted,
            first_token_seconds=first - self._submitted,
            decode_seconds=now - first,
        )

    def publish_position(self, admitted: Admitted) -> None:
        self.position = admitted.queue_position
        self.stream.put(admitted)


class StreamRegistry:
    """The streams of all requests that have not ended. `clock` is the engine's, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_request: dict[int, StreamState] = {}
        self._has_new = False
        self._positions_published = 0.0

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request_id: int, stream: Stream, num_open: int) -> None:
        self._by_request[request_id] = StreamState(stream, num_open, self._clock())
        self._has_new = True

    def remove(self, request_id: int) -> None:
        """Remove the stream of a request whose reader has disconnected."""
        del self._by_request[request_id]

    def publish(self, outcomes: Iterable[Outcome]) -> list[int]:
        """Publish the outcomes; return the requests whose readers are behind."""
        now, behind = self._clock(), list[int]()
        for request_id, outcome in outcomes:
            if (reader := self._by_request.get(request_id)) is None:
                continue  # cancelled
            match outcome:
                case LongleafError():
                    self.close(request_id, outcome)
                case Acknowledged():
                    self.close(request_id)
                case Sealed():
                    pass  # published only once it is committed
                case Failed(error):
                    reader.stream.fail(error)
                    self.end_sample(request_id)
                case Ended():
                    reader.publish(outcome, now)
                    self.end_sample(request_id)
                case _:
                    reader.publish(outcome, now)
                    behind += [request_id] if reader.stream.is_full else []
        return behind

    def publish_positions(self, positions: Callable[[], Mapping[int, Admitted]]) -> None:
        """Publish queue positions: for new requests immediately, changes every POSITION_SECONDS."""
        now = self._clock()
        is_due = now - self._positions_published >= POSITION_SECONDS
        if not (is_due or self._has_new):
            return
        for request_id, admitted in positions().items():
            reader = self._by_request[request_id]
            if reader.position is None or (is_due and reader.position != admitted.queue_position):
                reader.publish_position(admitted)
        self._has_new = False
        self._positions_published = now if is_due else self._positions_published

    def end_sample(self, request_id: int) -> None:
        """End a sample; the stream ends with the last one."""
        reader = self._by_request[request_id]
        reader.num_open -= 1
        if reader.num_open == 0:
            self.close(request_id)

    def close(self, request_id: int, error: Exception | None = None) -> None:
        """End the stream of a request, unless it has ended."""
        if (reader := self._by_request.pop(request_id, None)) is not None:
            reader.stream.close(error)

    def close_all(self, error: Exception) -> None:
        for request_id in list(self._by_request):
            self.close(request_id, error)
