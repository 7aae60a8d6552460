"""Names of contexts from names of files, as the web page makes them."""

import re
import unicodedata

from longleaf.documents.kinds import SUFFIXES

MAX_LENGTH = 63
TEXT_SUFFIXES = ".txt .text .md .markdown .rst .xml .csv .json .log .tex .srt".split()
_LONGEST_FIRST = sorted((*SUFFIXES, *TEXT_SUFFIXES), key=len, reverse=True)
_SUFFIX = re.compile(f"(?:{'|'.join(map(re.escape, _LONGEST_FIRST))})$")


def context_name(file: str) -> str:
    """A valid name of a context: "Moby Dick (1851).txt" becomes moby-dick-1851."""
    plain = _SUFFIX.sub("", file.lower()).replace("ß", "ss")
    plain = "".join(char for char in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(char))
    plain = re.sub(r"[^a-z0-9._]+", "-", plain)
    return plain[:MAX_LENGTH].strip("._-") or "document"
