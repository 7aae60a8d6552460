"""Which rank is to blame when several report trouble at once."""

import asyncio

from longleaf.errors import LongleafError, WorkerLost

GRACE_SECONDS = 0.5
"""How long further reports are gathered after the first. One rank's death makes its peers raise, often sooner than the
fleet sees the death, and the verdict must name the rank that died."""


class Losses:
    """Gathers reports of lost ranks into one `verdict`, a future that is set once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._failed: dict[int, str] = {}
        self._died: dict[int, str] = {}
        self._blamed: dict[int, str] = {}
        self.verdict: asyncio.Future[LongleafError] = loop.create_future()

    def failed(self, rank: int, reason: str, blamed: int | None = None) -> None:
        """The rank itself said that it raised, perhaps because it saw another one gone."""
        self._failed.setdefault(rank, reason)
        if blamed is not None:
            self._blamed.setdefault(blamed, reason)
        self._gather()

    def died(self, rank: int, reason: str) -> None:
        """The fleet saw that the rank's process ended."""
        self._died.setdefault(rank, reason)
        self._gather()

    @property
    def is_suspected(self) -> bool:
        """A report is in; the verdict is on its way. Nothing that ranks say from now on counts."""
        return bool(self._failed or self._died or self.verdict.done())

    def _gather(self) -> None:
        if len(self._failed) + len(self._died) == 1:
            self._loop.call_later(GRACE_SECONDS, self._decide)

    def _decide(self) -> None:
        """A rank that died without a word comes first, then one that others saw gone, then those that raised, in the
        order of their reports."""
        speechless = {rank: reason for rank, reason in self._died.items() if rank not in self._failed}
        rank, reason = next(iter((speechless or self._blamed or self._failed).items()))
        self.conclude(WorkerLost(rank, self._failed.get(rank, reason)))

    def conclude(self, error: LongleafError) -> None:
        """Settles the verdict, unless it is settled."""
        if not self.verdict.done():
            self.verdict.set_result(error)
