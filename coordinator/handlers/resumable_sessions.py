"""Sessions that outlive the stream that started them: another stream can resume them."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from coordinator.handlers.fair_share import ShareLimit, eviction_victim
from longleaf.errors import DeadlineExceeded, LongleafError, ResourceExhausted, Unavailable
from longleaf.formatting import human_seconds
from longleaf.types import Account

IDLE_SECONDS = 120.0
"""Seconds for which an open stream may send nothing."""
KEEP_SECONDS = 600.0
"""Seconds for which a session without a stream is kept."""
TRIM_SECONDS = 30.0
"""Seconds between two searches for expired sessions."""
MAX_BYTES = 1 << 30
"""Bytes of memory that all sessions of one kind may hold together."""
RETRY_SECONDS = 5.0

CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
"""Calls a function after a number of seconds, on the event loop."""


def call_later(seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, function)


class ResumableSession(Protocol):
    """State that streams share, one after the other."""

    @property
    def num_buffered_bytes(self) -> int:
        """Approximate bytes of memory held."""
        ...

    @property
    def is_working(self) -> bool:
        """Whether the session works without a stream, so that it must not be dropped."""
        ...


T = TypeVar("T", bound=ResumableSession)
Report = TypeVar("Report")
Message = TypeVar("Message")


class Lease:
    """The right of one stream to continue a session, until another stream takes over. Everything that the stream does
    with the session is done in `run`."""

    def __init__(self) -> None:
        self._step: asyncio.Task[Any] | None = None
        self._revocation: LongleafError | None = None

    @property
    def is_current(self) -> bool:
        return self._revocation is None

    def revoke(self, error: LongleafError) -> None:
        """Ends the lease. The work of its stream is cancelled, and `run` raises `error`."""
        self._revocation = error
        if self._step is not None:
            self._step.cancel()

    async def run(self, reports: AsyncGenerator[Report, None]) -> AsyncGenerator[Report, None]:
        """Yields the reports of the stream's work, and closes them. Raises the error of `revoke`.

        The work between two reports is a task. A revocation cancels this task, wherever it waits, and no further one
        begins: the work itself need not check that the lease still holds. State may be changed up to an `await`, but
        not across one, except in a thread or task that completes on its own.
        """
        async with aclosing(reports):
            while self._revocation is None:
                self._step = asyncio.create_task(_next(reports))
                try:
                    report = await self._step
                except asyncio.CancelledError:
                    if self._revocation is None:
                        raise
                    break
                if report is None:
                    return
                yield report
        raise self._revocation


async def next_message(messages: AsyncIterator[Message], seconds: float, noun: str) -> Message | None:
    """The next message of a stream, which belongs to a `noun`; None at the end. Raises DeadlineExceeded if none arrives
    for `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(messages, None)
    except TimeoutError:
        raise DeadlineExceeded(f"the stream of this {noun} sent nothing for {human_seconds(seconds)}") from None


async def _next(reports: AsyncGenerator[Report, None]) -> Report | None:
    return await anext(reports, None)


@dataclass(slots=True)
class _SessionState:
    account: Account
    key: Hashable | None
    """The key under which another stream finds the session; None if it cannot be resumed."""
    num_bytes: int = 0
    """Bytes of memory that count toward the limits."""
    lease: Lease | None = None
    """The lease of the open stream; None while there is none."""
    idle_since: float | None = None
    """When the last stream disconnected; None before the first one and while one is open."""


class ResumableSessions(Generic[T]):
    """Sessions of one kind: those with an open stream, and those that can be resumed. `noun` names one of them in
    errors, `clock` counts seconds, `later` calls a function after a number of seconds, `limits` returns the shares that
    apply to an account, and `on_remove` is called for each session that is removed.

    A session without a stream is kept for `keep_seconds`. There are at most `max_sessions`, which hold at most
    `max_bytes` together, and each account is limited to its shares. When a limit is reached, the oldest idle session of
    the tenant that holds most is dropped.
    """

    def __init__(
        self,
        noun: str,
        clock: Callable[[], float],
        later: CallLater,
        limits: Callable[[Account], Iterable[ShareLimit]],
        *,
        keep_seconds: float,
        max_sessions: int,
        max_bytes: int,
        on_remove: Callable[[T], object] = lambda _: None,
    ) -> None:
        self._noun = noun
        self._clock, self._later = clock, later
        self._limits = limits
        self._keep_seconds, self._max_sessions, self._max_bytes = keep_seconds, max_sessions, max_bytes
        self._on_remove = on_remove
        self._timer: asyncio.TimerHandle | None = None
        self._states: dict[T, _SessionState] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._states)

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of memory that all sessions hold."""
        return sum(state.num_bytes for state in self._states.values())

    @property
    def keys(self) -> set[Hashable]:
        """The keys of the sessions that can be resumed, and None."""
        return {state.key for state in self._states.values()}

    def num_of(self, tenant: str) -> int:
        """Sessions of a tenant that are open or can be resumed."""
        self._trim()
        return sum(state.account[0] == tenant for state in self._states.values())

    def find(self, key: Hashable) -> T | None:
        """The session that can be resumed under `key`."""
        self._trim()
        return next((session for session, state in self._states.items() if state.key == key), None)

    def add(self, session: T, account: Account, key: Hashable | None) -> None:
        """Adds a session that has no stream yet; without a key it cannot be resumed. Raises ResourceExhausted when
        there are too many."""
        self._trim()
        for share in self._limits(account):
            count = sum(share.is_theirs(state.account) for state in self._states.values())
            most = self._max_sessions * share.part
            if count >= most and not self._drop_oldest(share.is_theirs):
                raise self._exhausted(f"{count} of {share.owner_of} are open or resumable; the limit is {int(most)}")
        usage = Counter(state.account[0] for state in self._states.values())
        if len(self._states) >= self._max_sessions and not self._make_room(usage, account[0]):
            raise self._exhausted(f"{len(self._states)} are open, which is the limit")
        self._states[session] = _SessionState(account, key)

    def update_size(self, session: T, num_arrived: int = 0) -> None:
        """Updates the size of an open session, including `num_arrived` bytes that it has not taken yet. Raises
        ResourceExhausted when a limit is exceeded."""
        state = self._states[session]
        state.num_bytes = session.num_buffered_bytes + num_arrived
        for share in self._limits(state.account):
            most = int(self._max_bytes * share.part)
            if state.num_bytes > most:
                message = f"it uses {state.num_bytes:,} bytes of memory; the limit of {share.owner_of} is {most:,}"
                raise self._exhausted(message, None)
            while (used := self._num_bytes_of(share.is_theirs)) > most:
                if not self._drop_oldest(share.is_theirs):
                    raise self._exhausted(
                        f"those of {share.owner_of} use {used:,} bytes of memory; the limit is {most:,}"
                    )
        while self.num_bytes > self._max_bytes:
            if not self._make_room(self._bytes_by_tenant(), state.account[0]):
                raise self._exhausted(f"all {self._noun}s use too much memory; the limit is {self._max_bytes:,} bytes")

    def _exhausted(self, message: str, retry_seconds: float | None = RETRY_SECONDS) -> ResourceExhausted:
        return ResourceExhausted(f"{self._noun}s", message, retry_seconds)

    # --- streams ---

    def acquire(self, session: T, reason: LongleafError | None = None) -> Lease:
        """Makes a new stream the owner of a session. The stream of the previous owner ends with `reason`, by default
        Unavailable."""
        state = self._states[session]
        if state.lease is not None:
            state.lease.revoke(reason or Unavailable(f"another stream continued this {self._noun}"))
        state.lease, state.idle_since = Lease(), None
        state.num_bytes = session.num_buffered_bytes  # without a message that the previous owner had not added
        return state.lease

    def release(self, session: T, lease: Lease) -> bool:
        """Ends the ownership of a stream. Returns whether the session is kept or another stream has taken over."""
        state = self._states.get(session)
        if state is None or state.lease is not lease:
            return True
        state.lease, state.idle_since = None, self._clock()
        if state.key is None:
            self._remove(session)
        self._trim()
        return session in self._states

    def forget(self, session: T) -> None:
        """Makes a session impossible to resume. It is removed once it has no stream."""
        if (state := self._states.get(session)) is not None:
            state.key = None
            if state.idle_since is not None:
                self._remove(session)

    def close(self) -> None:
        """Removes all sessions, and ends their streams with Unavailable. Idempotent."""
        for session, state in list(self._states.items()):
            if state.lease is not None:
                state.lease.revoke(Unavailable("the service is stopping"))
            self._remove(session)
        if self._timer is not None:
            self._timer.cancel()

    # --- removal ---

    def _remove(self, session: T) -> None:
        del self._states[session]
        self._on_remove(session)

    def _idle(self) -> list[tuple[float, T, Account]]:
        """Sessions that may be dropped, with the start of their wait, the oldest first."""
        idle = [
            (state.idle_since, session, state.account)
            for session, state in self._states.items()
            if state.idle_since is not None and not session.is_working
        ]
        return sorted(idle, key=lambda each: each[0])

    def _drop_oldest(self, is_theirs: Callable[[Account], bool]) -> bool:
        """Drops the oldest idle session of these accounts. Returns whether there was one."""
        found = next((session for _, session, account in self._idle() if is_theirs(account)), None)
        if found is not None:
            self._remove(found)
        return found is not None

    def _make_room(self, usage: Counter[str], tenant: str = "") -> bool:
        """Drops the oldest idle session of the tenant with the largest `usage`; another tenant than `tenant` must hold
        more than it. Returns whether a session was dropped."""
        victim = eviction_victim(usage, {account[0] for _, _, account in self._idle()}, tenant)
        return victim is not None and self._drop_oldest(lambda other: other[0] == victim)

    def _num_bytes_of(self, is_theirs: Callable[[Account], bool]) -> int:
        return sum(state.num_bytes for state in self._states.values() if is_theirs(state.account))

    def _bytes_by_tenant(self) -> Counter[str]:
        usage = Counter[str]()
        for state in self._states.values():
            usage[state.account[0]] += state.num_bytes
        return usage

    def _trim(self) -> None:
        now = self._clock()
        for since, session, _ in self._idle():
            self._states[session].num_bytes = session.num_buffered_bytes  # work of its stream may have ended since
            if now - since > self._keep_seconds:
                self._remove(session)
        while self.num_bytes > self._max_bytes and self._make_room(self._bytes_by_tenant()):
            pass
        if self._timer is None and any(state.idle_since is not None for state in self._states.values()):
            self._timer = self._later(TRIM_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._trim()

    def audit(self) -> None:
        """Checks that every session without a stream can be resumed. Raises AssertionError."""
        for state in self._states.values():
            assert state.idle_since is None or (state.lease is None and state.key is not None)
        keys = [state.key for state in self._states.values() if state.key is not None]
        assert len(keys) == len(set(keys))
