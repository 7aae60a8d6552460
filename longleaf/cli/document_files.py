"""Files of a document: which of them is no text."""

import stat
from codecs import getincrementaldecoder
from collections.abc import Sequence
from pathlib import Path

from longleaf.errors import InvalidArgument

PIECE_BYTES = 1 << 18
KINDS = (
    (b"%PDF", "is a PDF: convert it to plain text first"),
    (b"PK\x03\x04", "is an archive or an office document: convert it to plain text first"),
    (b"\xff\xfe", "is UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16: save it as UTF-8"),
)
"""How files begin that are often taken for text, and what is said of them."""


def objection(files: Sequence[str]) -> InvalidArgument | None:
    """Names the first file that keeps these from being one UTF-8 text, and the byte in that file. None where there is
    none, or where a file cannot be read again, such as `-`."""
    decoder, start, path = getincrementaldecoder("utf-8")(), 0, Path()
    resident = 0
    """Bytes of a character that the last piece has cut."""
    try:
        for path in map(Path, files):
            if not path.is_file():
                return None
            with path.open("rb") as file:
                start, head = 0, file.read(PIECE_BYTES)
                piece = head
                while piece:
                    resident = len(decoder.getstate()[0])
                    try:
                        decoder.decode(piece)
                    except UnicodeDecodeError as error:
                        return InvalidArgument(str(path), _reason(head, start - resident + error.start, error.reason))
                    start += len(piece)
                    piece = file.read(PIECE_BYTES)
        resident = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return InvalidArgument(str(path), f"is not UTF-8 at byte {start - resident}: {error.reason}")
    except OSError:
        return None
    return None


def _reason(head: bytes, place: int, reason: str) -> str:
    known = next((reported for begin, reported in KINDS if head.startswith(begin)), None)
    return known or f"is not UTF-8 at byte {max(0, place)}: {reason}"


def empty_files(files: Sequence[str]) -> list[str]:
    """Those that are on a disk and have no bytes. Files that the kernel makes up say so of themselves, too."""
    return [file for file in files if _is_empty(Path(file))]


def _is_empty(path: Path) -> bool:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            return False
        with path.open("rb") as file:
            return not file.read(1)
    except OSError:
        return False
