"""The error hierarchy.

    LongleafError
    ├── InvalidArgument          an invalid argument; names the field and the limit
    ├── NotFound                 the named resource does not exist
    ├── AlreadyExists            the name is taken
    ├── ResourceExhausted        no capacity now; names the retry delay
    ├── DeadlineExceeded         the caller's deadline has passed, or would pass before an answer is ready
    ├── Cancelled                another call cancelled this one, or the client was closed
    ├── PermissionDenied         the caller is not permitted to do this, or not from its address
    ├── Unauthenticated          the credentials are missing or wrong
    ├── NotFinite                the model computed NaN or infinity; names the tokens
    ├── ContextLost              a context was dropped after a loss of ranks; gives the reason
    ├── DataLoss                 stored data is damaged; names it and the remedy
    ├── CheckpointChanged        another checkpoint computed a stored context; names the differences
    ├── FailedPrecondition       the current state forbids the operation; names the required change
    ├── Unavailable              the service cannot answer
    │   ├── RankLost             a rank died, raised or hung; names the rank
    │   ├── GroupFailed          the ranks could not continue together, but all of them are alive
    │   └── StorageUnavailable   storage cannot be written or read; gives the reason
    ├── CollectiveMismatch       ranks execute different collectives at the same time; describes two of them
    ├── ExchangeAborted          the epoch of an exchange has ended, so a rank must not wait for the others
    ├── TransferCorrupted        a rank received keys that differ from the sent ones; names both ranks
    ├── PieceNotFetched          a rank has not fetched the piece to restore; names the rank and the ticket
    └── StartError               the service cannot start with these settings
        ├── ModelRefused         this checkpoint cannot be served exactly
        └── CatalogError         the catalog of earlier service processes cannot be opened; names the remedy

Only `longleaf.codec.status` converts them to gRPC statuses and back.
"""


class LongleafError(Exception):
    """Base class of all errors. Constructors have a parameter `message`, or one for each attribute."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class InvalidArgument(LongleafError, ValueError):
    """An argument is invalid. `field` is its path in the request; `description` states the valid values."""

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
    """The resource `name` exists. For a context, the message gives advice."""

    def __init__(self, name: str) -> None:
        advice = ": append to it, delete it, or use another name" if name.startswith("contexts/") else ""
        super().__init__(f"{name} already exists{advice}")
        self.name = name


class ResourceExhausted(LongleafError):
    """There is no capacity now. `retry_seconds` is the suggested delay, or None if waiting does not help."""

    def __init__(self, subject: str, description: str, retry_seconds: float | None = None) -> None:
        super().__init__(f"{subject}: {description}")
        self.subject = subject
        self.description = description
        self.retry_seconds = retry_seconds


class DeadlineExceeded(LongleafError):
    """The caller's deadline has passed, or would pass before an answer is ready."""


class Cancelled(LongleafError):
    """Another call cancelled this one, or the client was closed."""


class PermissionDenied(LongleafError):
    """The caller is not permitted to do this, or not from its address."""


class Unauthenticated(LongleafError):
    """The credentials of the caller are missing or wrong."""


class NotFinite(LongleafError):
    """The model computed NaN or infinity at `tokens`, such as `token 3 of the answer` (counted from 0). Retrying the
    same request may fail in the same way."""

    def __init__(self, tokens: str) -> None:
        super().__init__(f"{tokens}: the model computed values that are not finite")
        self.tokens = tokens


class ContextLost(LongleafError):
    """The context `name` (for instance `contexts/moby`) was dropped after a loss of ranks, for `reason`. It can be
    ingested again."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} was lost: {reason}")
        self.name = name
        self.reason = reason


class DataLoss(LongleafError):
    """The stored data of `name` (for instance `contexts/moby`) is damaged and not used; `reason` describes the damage
    and the remedy."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is damaged: {reason}")
        self.name = name
        self.reason = reason


class CheckpointChanged(LongleafError):
    """The stored context `name` (for instance `contexts/moby`) was computed by another checkpoint than the current one;
    `changes` describes the differences and the remedy."""

    def __init__(self, name: str, changes: str) -> None:
        super().__init__(f"{name} was read by another checkpoint: {changes}")
        self.name = name
        self.changes = changes


class FailedPrecondition(LongleafError):
    """The current state forbids the operation, and waiting does not help: `description` states the required change.
    `subject` is the affected resource, such as `contexts/moby`."""

    def __init__(self, subject: str, description: str) -> None:
        super().__init__(f"{subject}: {description}")
        self.subject = subject
        self.description = description


class Unavailable(LongleafError):
    """The service cannot answer. `retry_seconds` is the suggested delay if nothing was started and waiting helps."""

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class RankLost(Unavailable):
    """Rank `rank` died, raised or hung, for `reason`."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} was lost: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type["RankLost"], tuple[int, str]]:
        return RankLost, (self.rank, self.reason)


class GroupFailed(Unavailable):
    """The ranks could not continue together: one raised, or all were late. None of them was lost."""


class StorageUnavailable(Unavailable):
    """Storage cannot be written or read now: a full disk, a read-only folder, an unreachable object store. Data stored
    before is intact."""


class CollectiveMismatch(LongleafError):
    """Ranks called different collectives, or with messages of different sizes; the message describes two of them."""


class ExchangeAborted(LongleafError):
    """The epoch of an exchange has ended, so the other ranks will not participate."""


class TransferCorrupted(LongleafError):
    """The keys and values that rank `target` received differ from those that rank `source` sent."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(f"rank {target} received other keys than rank {source} sent")
        self.source = source
        self.target = target


class PieceNotFetched(LongleafError):
    """Rank `rank` cannot restore the piece with `ticket`: it has not fetched it, or the piece lacks the positions."""

    def __init__(self, rank: int, ticket: int) -> None:
        super().__init__(f"rank {rank} has no fetched piece for ticket {ticket}")
        self.rank = rank
        self.ticket = ticket


class StartError(LongleafError):
    """The service cannot start with these settings."""


class ModelRefused(StartError):
    """The checkpoint cannot be served exactly; the message gives the reason."""


class CatalogError(StartError):
    """The catalog of earlier service processes cannot be opened: another service uses it, it is damaged, or a later
    version wrote it. The message names the remedy."""
