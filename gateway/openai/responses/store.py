"""Stored responses, and texts of running ones, with limits on age, number and bytes."""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gateway.errors import busy
from gateway.openai.responses.files import ResponseFiles, TurnRecord
from longleaf.types import Message

MAX_RESPONSES = 4096
"""Maximum number of stored responses of one owner."""
MAX_OWNER_BYTES = 64 << 20
"""Maximum bytes of the stored and running responses of one owner."""
MAX_BYTES = 128 << 20
"""Maximum bytes of all of them."""
RESPONSE_BYTES = 1024
"""Estimated bytes of the objects of a response, besides its texts."""


class ConversationTurn:
    """The messages that one response adds to a conversation. Several turns may continue the same one."""

    def __init__(
        self, owner: str, previous: "ConversationTurn | None", messages: tuple[Message, ...], turn_id: str = ""
    ) -> None:
        """`turn_id` is the id of the response; empty while it is running."""
        self.id, self.owner, self.previous, self.messages = turn_id, owner, previous, messages
        self.num_bytes = sum(map(_message_bytes, messages))

    def conversation(self) -> tuple[Message, ...]:
        """All messages up to the end of this turn."""
        turns = [turn.messages for turn in self.path()]
        return tuple(message for messages in reversed(turns) for message in messages)

    def path(self) -> "Iterator[ConversationTurn]":
        """This turn and those before it, the last one first."""
        turn: ConversationTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous


class StoredResponse(NamedTuple):
    """A response."""

    encoded: bytes
    """The response as JSON."""
    turn: ConversationTurn
    created: float
    """Seconds since 1970."""
    expires: float

    @property
    def num_bytes(self) -> int:
        """Bytes besides those of the conversation."""
        return len(self.encoded) + RESPONSE_BYTES


class ResponseStore:
    """Responses by owner and id. Where a limit is exceeded, the oldest ones are removed: those of the same owner, or,
    for the limit of all bytes, those of the owner with most bytes. A turn is retained as long as a stored response
    continues it."""

    def __init__(
        self,
        seconds: float,
        *,
        max_responses: int = MAX_RESPONSES,
        max_owner_bytes: int = MAX_OWNER_BYTES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
        files: ResponseFiles | None = None,
    ) -> None:
        """`seconds` is the lifetime of a response. With `files`, the store begins with the responses in them."""
        self._seconds, self._clock, self._files = seconds, clock, files
        self._max_responses, self._max_owner_bytes, self._max_bytes = max_responses, max_owner_bytes, max_bytes
        self._responses = dict[str, dict[str, StoredResponse]]()
        """By owner and id, the oldest first."""
        self._num_users = dict[ConversationTurn, int]()
        """How many stored responses and turns continue each turn."""
        self._num_bytes = dict[str, int]()
        """By owner."""
        self._running = dict[ConversationTurn, int]()
        """Turns of running responses, and the bytes of their other texts."""
        if files is not None:
            self._load(files)

    def _load(self, files: ResponseFiles) -> None:
        turns, stored = dict[str, ConversationTurn](), list[StoredResponse]()
        for record in files.load():
            previous = turns.get(record.previous)
            if record.previous and previous is None:  # the process ended before the earlier turn was written
                files.delete(record.id)
                continue
            turn = turns[record.id] = ConversationTurn(record.owner, previous, record.messages, record.id)
            if record.encoded:
                stored.append(StoredResponse(record.encoded, turn, record.created, record.expires))
        for each in sorted(stored, key=lambda each: each.created):
            self._insert(each)
        for turn in turns.values():
            if turn not in self._num_users:
                files.delete(turn.id)
        self.remove_expired()
        for owner in list(self._responses):
            self._shrink(owner)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """None if the owner has no such response, or if it has expired."""
        self.remove_expired()
        return self._responses.get(owner, {}).get(response_id)

    def add(self, turn: ConversationTurn, encoded: bytes) -> None:
        """Stores the response of a turn, and removes others that exceed the limits."""
        self.remove_expired()
        now = self._clock()
        stored = StoredResponse(encoded, turn, now, now + self._seconds)
        self._insert(stored)
        self._save(stored)
        self._shrink(turn.owner)

    def _insert(self, stored: StoredResponse) -> None:
        turn = stored.turn
        self._responses.setdefault(turn.owner, {})[turn.id] = stored
        self._count(turn.owner, stored.num_bytes)
        self._retain(turn)

    def _save(self, stored: StoredResponse) -> None:
        if self._files is None:
            return
        turn = stored.turn
        previous, depth = turn.previous.id if turn.previous else "", sum(1 for _ in turn.path()) - 1
        self._files.save(
            TurnRecord(
                turn.id, turn.owner, previous, depth, turn.messages, stored.encoded, stored.created, stored.expires
            )
        )

    @contextmanager
    def running(self, turn: ConversationTurn, num_bytes: int) -> Generator[None, None, None]:
        """Counts the texts of a running response: those of its turn, and `num_bytes` of others. Raises HttpProblem if
        a limit is exceeded and no response is left to remove."""
        self.remove_expired()
        self._running[turn] = num_bytes
        self._retain(turn)
        self._count(turn.owner, num_bytes)
        try:
            if not self._shrink(turn.owner):
                raise busy("it holds as many texts of running responses as it can")
            yield
        finally:
            del self._running[turn]
            self._release(turn)
            self._count(turn.owner, -num_bytes)

    def _shrink(self, owner: str) -> bool:
        """Removes responses until no limit is exceeded. Returns False if none are left to remove."""
        while self._responses.get(owner) and (
            len(self._responses[owner]) > self._max_responses or self._num_bytes[owner] > self._max_owner_bytes
        ):
            self._remove_oldest(owner)
        while sum(self._num_bytes.values()) > self._max_bytes and self._responses:
            self._remove_oldest(max(self._responses, key=lambda each: self._num_bytes[each]))
        num_bytes = self._num_bytes.get(owner, 0)
        return num_bytes <= self._max_owner_bytes and sum(self._num_bytes.values()) <= self._max_bytes

    def remove(self, owner: str, response_id: str) -> bool:
        """Whether the owner had such a response."""
        self.remove_expired()
        if response_id not in self._responses.get(owner, {}):
            return False
        self._remove(owner, response_id)
        return True

    def remove_expired(self) -> None:
        """Removes expired responses. Other methods do so first."""
        now = self._clock()
        for owner, responses in list(self._responses.items()):
            for response_id, stored in list(responses.items()):
                if stored.expires > now:
                    break
                self._remove(owner, response_id)

    def audit(self) -> None:
        """Asserts that bytes and users are counted right."""
        users, num_bytes = dict[ConversationTurn, int](), dict[str, int]()
        for owner, responses in self._responses.items():
            for stored in responses.values():
                num_bytes[owner] = num_bytes.get(owner, 0) + stored.num_bytes
                users[stored.turn] = users.get(stored.turn, 0) + 1
        for turn, more_bytes in self._running.items():
            num_bytes[turn.owner] = num_bytes.get(turn.owner, 0) + more_bytes
            users[turn] = users.get(turn, 0) + 1
        for turn in {each for stored in users for each in stored.path()}:
            num_bytes[turn.owner] = num_bytes.get(turn.owner, 0) + turn.num_bytes
            if turn.previous is not None:
                users[turn.previous] = users.get(turn.previous, 0) + 1
        assert users == self._num_users
        assert {owner: count for owner, count in num_bytes.items() if count} == self._num_bytes

    def _remove_oldest(self, owner: str) -> None:
        self._remove(owner, next(iter(self._responses[owner])))

    def _remove(self, owner: str, response_id: str) -> None:
        stored = self._responses[owner].pop(response_id)
        if not self._responses[owner]:
            del self._responses[owner]
        self._release(stored.turn)
        self._count(owner, -stored.num_bytes)
        if stored.turn in self._num_users:  # other responses continue it
            self._save(stored._replace(encoded=b""))

    def _retain(self, turn: ConversationTurn) -> None:
        for each in turn.path():
            self._num_users[each] = self._num_users.get(each, 0) + 1
            if self._num_users[each] > 1:
                return
            self._count(each.owner, each.num_bytes)

    def _release(self, turn: ConversationTurn) -> None:
        for each in turn.path():
            self._num_users[each] -= 1
            if self._num_users[each] > 0:
                return
            del self._num_users[each]
            self._count(each.owner, -each.num_bytes)
            if self._files is not None and each.id:
                self._files.delete(each.id)

    def _count(self, owner: str, num_bytes: int) -> None:
        self._num_bytes[owner] = self._num_bytes.get(owner, 0) + num_bytes
        if self._num_bytes[owner] == 0:
            del self._num_bytes[owner]


def _message_bytes(message: Message) -> int:
    texts = [message.text, message.reasoning, message.tool_call_id]
    texts += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    return sum(map(sys.getsizeof, texts)) + sys.getsizeof(message)
