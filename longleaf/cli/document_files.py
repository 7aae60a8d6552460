"""Detection of files that are not UTF-8 text."""

import stat
from codecs import getincrementaldecoder
from collections.abc import Sequence
from pathlib import Path

from longleaf.errors import InvalidArgument

PIECE_BYTES = 1 << 18
KINDS = (
    (b"%PDF", "is a PDF, but must be plain text (UTF-8): convert it, for example with pdftotext"),
    (
        b"PK\x03\x04",
        "is an Office document or an archive, but must be plain text (UTF-8): convert it, for example with pandoc",
    ),
    (b"\xff\xfe", "is UTF-16, but must be UTF-8: convert it, for example with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "is UTF-16, but must be UTF-8: convert it, for example with iconv -f UTF-16 -t UTF-8"),
)
"""First bytes of common binary formats, and the error message for each."""


def find_invalid_utf8(files: Sequence[str]) -> InvalidArgument | None:
    """An error that names the first file that is not UTF-8, and the offset in that file. None if there is none, or if a
    file cannot be read again, such as `-`."""
    decoder, start, path = getincrementaldecoder("utf-8")(), 0, Path()
    resident = 0
    """Bytes of an incomplete character at the end of the last piece."""
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
    known = next((text for begin, text in KINDS if head.startswith(begin)), None)
    return known or f"is not UTF-8 at byte {max(0, place)}: {reason}"


def empty_files(files: Sequence[str]) -> list[str]:
    """The regular files without content. Files of /proc also have size 0, so the first byte is read."""
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
