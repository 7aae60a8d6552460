"""Every error of the project, in one tree.

    LongleafError
    ├── InvalidArgument      a field of the caller's is wrong; names the field and the limit
    ├── NotFound             the named resource does not exist
    ├── AlreadyExists        the name is taken
    ├── ResourceExhausted    no room now; says when to try again
    ├── DeadlineExceeded     the caller's deadline has passed, or passes before an answer can be there
    ├── Cancelled            another call ended what this one reads, or its client was closed
    ├── PermissionDenied     the caller may not ask for this, or not from where it is
    ├── Unauthenticated      the service does not know who calls
    ├── NotFinite            the model's numbers became NaN or infinite; names the tokens
    ├── ContextLost          a context was given up after a loss of ranks; says why
    ├── DataLoss             what was kept is damaged; names it and says what to do
    ├── CheckpointChanged    a kept context was read by another checkpoint; names both and says what differs
    ├── FailedPrecondition   something else must change before this can be done; says what
    ├── Unavailable          the service cannot answer
    │   ├── RankLost       a rank died, raised or hung; names the rank
    │   ├── GroupFailed      the ranks could not go on together, and all of them live
    │   └── StorageUnavailable   what should be kept cannot be, or not be read; says why
    ├── CollectiveMismatch        ranks do different things at the same time; says what two of them do
    ├── Fenced               a rank may not wait for the others any more
    ├── TransferCorrupted          keys came to a rank otherwise than another one sent them; names both
    ├── PieceNotFetched          a rank has not fetched what it was to restore; names both
    └── StartError           the service cannot start with these settings
        ├── ModelRefused     this checkpoint cannot be served exactly
        └── CatalogError     what earlier services kept cannot be opened; says what to do

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


class PermissionDenied(LongleafError):
    """The caller may not ask for this, or not from where it is."""


class Unauthenticated(LongleafError):
    """The service does not know who calls: there are no credentials, or not the right ones."""


class NotFinite(LongleafError):
    """What the model computes at `tokens`, such as `token 3 of the answer` counted from 0, is NaN or infinite. The same
    request may fail in the same way again: no wait helps."""

    def __init__(self, tokens: str) -> None:
        super().__init__(f"{tokens}: what the model computes is not finite")
        self.tokens = tokens


class ContextLost(LongleafError):
    """The context `name` (for instance `contexts/moby`) was there, and was given up after a loss of ranks, for
    `reason`. It can be ingested again."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} was lost: {reason}")
        self.name = name
        self.reason = reason


class DataLoss(LongleafError):
    """What was kept of `name` (for instance `contexts/moby`) is damaged: `reason` says what, and what to do. It is
    never used."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is damaged: {reason}")
        self.name = name
        self.reason = reason


class CheckpointChanged(LongleafError):
    """The kept context `name` (for instance `contexts/moby`) was read by another checkpoint than the one that is
    served; `changes` says what differs, and what to do."""

    def __init__(self, name: str, changes: str) -> None:
        super().__init__(f"{name} was read by another checkpoint: {changes}")
        self.name = name
        self.changes = changes


class FailedPrecondition(LongleafError):
    """The state of things forbids it, and no wait helps: `description` says what must change first. `subject` is what
    it is about, such as `contexts/moby`."""

    def __init__(self, subject: str, description: str) -> None:
        super().__init__(f"{subject}: {description}")
        self.subject = subject
        self.description = description


class Unavailable(LongleafError):
    """The service cannot answer. `retry_seconds` is a sensible wait when nothing was begun and waiting helps."""

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
    """The ranks could not go on together: one raised, or all were late. None of them is gone."""


class StorageUnavailable(Unavailable):
    """What should be kept cannot be written, or what was kept not be read now: a disk is full, a folder read-only, an
    object store away. Nothing that was kept before is lost."""


class CollectiveMismatch(LongleafError):
    """Ranks meet for different operations, or with messages of different sizes; the message tells those of two."""


class ExchangeAborted(LongleafError):
    """The epoch has ended in which a rank would exchange something with others: nobody will come."""


class TransferCorrupted(LongleafError):
    """Keys and values came to rank `target` otherwise than rank `source` sent them."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(f"keys came to rank {target} otherwise than rank {source} sent them")
        self.source = source
        self.target = target


class PieceNotFetched(LongleafError):
    """Rank `rank` was to restore keys and values of the piece that it should have fetched under `ticket`: it has not,
    or the piece has no such positions."""

    def __init__(self, rank: int, ticket: int) -> None:
        super().__init__(f"rank {rank} has not fetched under ticket {ticket} what it was to restore")
        self.rank = rank
        self.ticket = ticket


class StartError(LongleafError):
    """The service cannot start with these settings."""


class ModelRefused(StartError):
    """The checkpoint cannot be served exactly; the message gives the reason."""


class CatalogError(StartError):
    """What earlier services kept cannot be opened: another one uses it, it is damaged, or a later version wrote it. The
    message says what to do."""
