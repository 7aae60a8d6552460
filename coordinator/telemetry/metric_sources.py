"""Sources of metrics: parts of a service, as callables that are read at each scrape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coordinator.telemetry.counters import Counts
from longleaf.types import Cluster

Count = Callable[[], int]
"""Returns how often something has happened."""


@dataclass(frozen=True, kw_only=True)
class MetricSources:
    """All are called on the event loop and must be fast. None: this service has no such source."""

    cluster: Callable[[], Cluster]
    """Raises LongleafError if it is unavailable."""
    counts: Callable[[], Counts]
    ranks_lost: Count
    refused_credentials: Count | None = None
    """Calls with unknown credentials, or without any."""
    refused_frames: Count | None = None
    """Unauthenticated connections to the control channel."""
    failed_reloads: Mapping[str, Count] = field(default_factory=dict[str, Count])
    """By kind of file: `credentials`, `certificates`."""
    unusable_files: Mapping[str, Callable[[], bool]] = field(default_factory=dict[str, Callable[[], bool]])
    """Whether the current content of a file is invalid; by the same kinds."""
    certificate_expiry: Callable[[], float | None] | None = None
    """Expiry of the server certificate, in seconds since the Unix epoch."""
