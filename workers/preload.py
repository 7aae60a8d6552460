"""Modules that the fork server imports for all ranks."""

from longleaf.resources import end_with_parent
from workers.imports import frozen_imports

end_with_parent()  # the coordinator may be killed during the import
with frozen_imports():
    from workers import control, rank

__all__ = ["control", "rank"]
