"""State of one generation on the client, across reconnections."""

import uuid
from collections.abc import Iterable

from longleaf import codec
from longleaf.codec import BytesLike
from longleaf.errors import GroupFailed, LongleafError, RankLost, Unavailable
from longleaf.types import Conversation, Delta, Event, Finished, GenerateOptions, Resume, Started
from longleaf.v1 import generation_service_pb2 as service_pb

RESUME_SECONDS = 60.0
"""How long the service keeps a generation without a reader."""


class GenerationStream:
    """The request, the progress of the answer, and the request for the rest of it."""

    def __init__(
        self, input: str | BytesLike | Iterable[int] | Conversation, context: str | None, options: GenerateOptions
    ) -> None:
        """Raises InvalidArgument if a value does not fit its field, and TypeError for an unknown option."""
        if unknown := options.keys() - GenerateOptions.__annotations__.keys():
            raise TypeError(f"Unexpected keyword argument '{min(unknown)}'")
        self.is_resumable = options.get("resumable", False)
        self.timeout = options.get("timeout")
        given = options.get("request_id", "")
        self._id = given or (uuid.uuid4().hex if self.is_resumable else "")
        self._is_private = self.is_resumable and not given
        self._num_samples = options.get("num_samples", 1)
        self._first: service_pb.GenerateRequest | None = codec.encode_generate(
            input,
            context,
            options,
            request_id=self._id,
            resume_seconds=RESUME_SECONDS if self.is_resumable else 0.0,
        )
        self._is_hiding = bool(options.get("hidden"))
        self._next_index: dict[int, int] = {}
        """Index of each sample's next token. May exceed the number of counted tokens, because events that this client
        ignores may carry tokens."""
        self._has_started = False
        self._finished: set[int] = set()

    def request(self) -> service_pb.GenerateRequest:
        """A request for the whole answer, or for the part that was not received."""
        if self._first is not None:
            return self._first
        return codec.encode_resume(Resume(self._id, sum(self._next_index.values())))

    @property
    def abandoned_id(self) -> str | None:
        """Id of a running generation that only this client knows and that no caller could resume."""
        is_going_on = self._has_started and len(self._finished) < self._num_samples
        return self._id if self._is_private and is_going_on else None

    def accept(self, event: Event) -> bool:
        """Whether the event is new: a resumed stream may begin with events that were already delivered. Raises
        LongleafError if the service is too old to support `hidden`, which it shows by an exact answer."""
        match event:
            case Started(is_exact=True) if self._is_hiding:
                raise LongleafError("the service is of an earlier version and cannot leave tokens of a context unread")
            case Delta():
                self._next_index[event.sample] = event.index + len(event.token_ids)
            case Finished(sample=sample):
                is_new = sample not in self._finished
                self._finished.add(sample)
                return is_new
            case Started(queue_position=0):
                is_new = not self._next_index
                self._begin()
                return is_new
            case _:
                self._begin()
        return True

    def _begin(self) -> None:
        """Drops the request once the service has it: a prompt may be large, and it is not sent again."""
        self._has_started, self._first = True, None


def can_resume(error: LongleafError) -> bool:
    """Whether the service may still hold the state of a call that broke with `error`."""
    return isinstance(error, Unavailable) and not isinstance(error, RankLost | GroupFailed)
