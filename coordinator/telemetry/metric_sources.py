"""What metrics are read from when somebody asks for them: the parts of a service, as callables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coordinator.telemetry.counters import Counts
from longleaf.types import Cluster

Count = Callable[[], int]
"""Tells how often something has happened by now."""


@dataclass(frozen=True, kw_only=True)
class MetricSources:
    """All are called on the event loop, and quick. What is None, this service has not."""

    cluster: Callable[[], Cluster]
    """Raises LongleafError while there is none."""
    counts: Callable[[], Counts]
    ranks_lost: Count
    refused_credentials: Count | None = None
    """Calls that came with credentials of nobody, or with none."""
    refused_frames: Count | None = None
    """Of the control channel: connections of strangers."""
    failed_reloads: Mapping[str, Count] = field(default_factory=dict[str, Count])
    """By what the files are: `credentials`, `certificates`."""
    unusable_files: Mapping[str, Callable[[], bool]] = field(default_factory=dict[str, Callable[[], bool]])
    """Whether what they say now cannot be used; by the same."""
    certificate_expiry: Callable[[], float | None] | None = None
    """When the certificate that is shown to clients ends, in seconds since the epoch."""
