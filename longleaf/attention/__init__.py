"""Attention as partials that merge. Knows tensors; must not know ranks, Ray, models or the wire."""

from longleaf.attention.partial import Partial, add_sink, merge, merge_all

__all__ = ["Partial", "add_sink", "merge", "merge_all"]
