"""The limits of extracted text in the process that receives it."""

from longleaf.documents.errors import LimitExceeded
from longleaf.documents.limits import LIMITS, ExtractionLimits


class TextBudget:
    """Counts the sections and the bytes of text and names of one upload, which may be several files."""

    def __init__(self, limits: ExtractionLimits = LIMITS) -> None:
        self._limits = limits
        self._num_sections = self._num_bytes = 0
        self.is_exceeded = False

    def add(self, num_bytes: int) -> None:
        """Counts a section, or a member without text. Raises LimitExceeded."""
        self._num_sections += 1
        self._num_bytes += num_bytes
        if self._num_sections > self._limits.num_sections:
            self.is_exceeded = True
            raise LimitExceeded(f"has more than {self._limits.num_sections:,} sections")
        if self._num_bytes > self._limits.text_bytes:
            self.is_exceeded = True
            raise LimitExceeded(f"has more than {self._limits.text_bytes:,} bytes of text and names")

    def remove(self, num_sections: int, num_bytes: int) -> None:
        """Frees the share of a file that was discarded."""
        self._num_sections -= num_sections
        self._num_bytes -= num_bytes
