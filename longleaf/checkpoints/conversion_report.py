"""Result of the process that converts a GGUF file."""

import msgspec


class ConversionReport(msgspec.Struct, frozen=True):
    """Whether a GGUF file was converted."""

    reason: str = ""
    """Reason why not; empty if it was converted."""
    is_full: bool = False
    """Whether the disk is full."""
