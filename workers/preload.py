"""Imports what every rank needs, for the process that ranks are forked from."""

from workers.imports import for_good

with for_good():
    from workers import rank

__all__ = ["rank"]
