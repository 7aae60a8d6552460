"""Attention as mergeable partials. Operates on tensors; must not depend on ranks, Ray, models or the protocol."""

from longleaf.attention.partial import Partial, add_sink, merge, merge_all

__all__ = ["Partial", "add_sink", "merge", "merge_all"]
