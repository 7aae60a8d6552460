"""Jobs whose readers are behind, and which of them must end when they are too many."""

from collections import Counter
from collections.abc import Iterator


class Pauses:
    """Paused jobs and their clients, the one that has been paused longest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._clients: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def add(self, job_id: int, client: str) -> None:
        """A job pauses; one that does already has done so since then."""
        self._clients.setdefault(job_id, client)

    def discard(self, job_id: int) -> None:
        self._clients.pop(job_id, None)

    @property
    def surplus(self) -> int | None:
        """When there are too many: of the client that has most, the job that has been paused longest."""
        if len(self) <= self.limit:
            return None
        greedy, _ = Counter(self._clients.values()).most_common(1)[0]
        return next(job_id for job_id, client in self._clients.items() if client == greedy)
