"""Limits of the extraction of text from one file."""

import msgspec


class ExtractionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one file, which may be an archive with many members."""

    file_bytes: int = 256 << 20
    """Size of the file."""
    text_bytes: int = 64 << 20
    """Extracted text, in UTF-8."""
    expanded_bytes: int = 1 << 30
    """Total decompressed size of an archive, including nested archives."""
    member_bytes: int = 128 << 20
    """Decompressed size of one member of an archive, or of one part of an Office file."""
    num_members: int = 10_000
    """Number of members of an archive, including nested archives, or of parts of an Office file."""
    depth: int = 3
    """Levels of archives: an archive in an archive has level 2."""
    num_pages: int = 20_000
    """Pages, slides or cells."""
    num_sections: int = 65_536
    """Sections with text, and members without text, of the file with all members. A section with more than MAX_TEXT
    characters counts as several."""
    memory_bytes: int = 1 << 30
    """Address space of the process, besides the file."""
    cpu_seconds: int = 60
    """Processor time."""
    seconds: float = 120.0
    """Time until the end of the extraction."""


LIMITS = ExtractionLimits()
