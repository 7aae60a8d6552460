"""The policy for saving contexts and for keeping their snapshots."""

from dataclasses import dataclass

from longleaf.config import DataConfig, SnapshotsChoice

GRACE_SECONDS = 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """See the settings of the same names."""

    mode: SnapshotsChoice = "seal"
    quota: int | None = None
    """Bytes."""
    expiry: float | None = None
    """Seconds without a use."""
    grace: float = GRACE_SECONDS
    """Seconds after which unreferenced objects are deleted: longer than any save takes."""

    @classmethod
    def of(cls, config: DataConfig) -> "RetentionPolicy":
        return cls(config.snapshots, config.snapshot_quota, config.snapshot_expiry)
