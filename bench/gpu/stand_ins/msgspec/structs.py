"""What is asked of fields."""

from dataclasses import replace

__all__ = ["replace"]
