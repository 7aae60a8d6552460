"""When a request started and was answered first."""

import msgspec

from coordinator.events import Ended, Event, Started, Tokens


class Timings:
    """Of one request, in seconds of the engine's clock."""

    def __init__(self, now: float, num_samples: int) -> None:
        self.num_open = num_samples
        """Samples that have not ended."""
        self.submitted = now
        self.started: float | None = None
        self.first_token: float | None = None
        self.position: int | None = None
        """Place in the queue that was told last."""

    def take(self, event: Event, now: float) -> None:
        """Notes when things happened for the first time: a preempted job begins again."""
        if isinstance(event, Started):
            self.started = now if self.started is None else self.started
            self.position = None
        if isinstance(event, Tokens) and self.first_token is None:
            self.first_token = now

    def fill(self, ended: Ended, now: float) -> Ended:
        first = now if self.first_token is None else self.first_token
        return msgspec.structs.replace(
            ended,
            queue_seconds=(self.started or self.submitted) - self.submitted,
            first_token_seconds=first - self.submitted,
            decode_seconds=now - first,
        )
