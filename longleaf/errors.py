"""Every error of the project, in one tree.

    LongleafError
    ├── InvalidArgument      a field of the caller's is wrong; names the field and the limit
    ├── NotFound             the named resource does not exist
    ├── AlreadyExists        the name is taken
    ├── ResourceExhausted    no room now; says when to try again
    ├── DeadlineExceeded     the caller's deadline has passed, or passes before an answer can be there
    ├── Cancelled            another call ended what this one reads, or its client was closed
    ├── NotFinite            the model's numbers became NaN or infinite; names the tokens
    ├── Unavailable          the service cannot answer
    │   └── WorkerLost       a rank died, raised or hung; names the rank
    ├── RanksDisagree        ranks do different things at the same time; says what two of them do
    └── StartError           the service cannot start with these settings
        └── ModelRefused     this checkpoint cannot be served exactly

`longleaf.codec.status` alone turns them into gRPC statuses and back.
"""


class LongleafError(Exception):
    """Root of all errors."""


class InvalidArgument(LongleafError, ValueError):
    """A value the caller gave is wrong. `field` is its path in the request, `description` says what would be right."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class NotFound(LongleafError):
    """The resource `name` (for instance `contexts/moby`) does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} does not exist")
        self.name = name


class AlreadyExists(LongleafError):
    """The resource `name` exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} already exists")
        self.name = name


class ResourceExhausted(LongleafError):
    """There is no room now. `retry_seconds` is a sensible wait, or None when waiting alone does not help."""

    def __init__(self, subject: str, description: str, retry_seconds: float | None = None) -> None:
        super().__init__(f"{subject}: {description}")
        self.subject = subject
        self.description = description
        self.retry_seconds = retry_seconds


class DeadlineExceeded(LongleafError):
    """The caller's deadline has passed, or will have before an answer can be there."""


class Cancelled(LongleafError):
    """Another call ended what this one reads, or the client was closed."""


class NotFinite(LongleafError):
    """What the model computes at `tokens`, such as `token 3 of the answer` counted from 0, is NaN or infinite. The same
    request may fail in the same way again: no wait helps."""

    def __init__(self, tokens: str) -> None:
        super().__init__(f"{tokens}: what the model computes is not finite")
        self.tokens = tokens


class Unavailable(LongleafError):
    """The service cannot answer."""


class WorkerLost(Unavailable):
    """Rank `rank` died, raised or hung, for `reason`."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} was lost: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type["WorkerLost"], tuple[int, str]]:
        return WorkerLost, (self.rank, self.reason)


class RanksDisagree(LongleafError):
    """Ranks meet for different operations, or with messages of different sizes; the message tells those of two."""


class StartError(LongleafError):
    """The service cannot start with these settings."""


class ModelRefused(StartError):
    """The checkpoint cannot be served exactly; the message gives the reason."""
