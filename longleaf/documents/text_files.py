"""Plain text in any encoding: byte order marks, declared charsets, the offset of an invalid byte."""

import codecs
import re
from pathlib import Path

from longleaf.documents.errors import NotText
from longleaf.errors import InvalidArgument
from longleaf.formatting import printable

PIECE_BYTES = 1 << 18
UTF8_BOM = codecs.BOM_UTF8
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NOT_CHARSETS = frozenset("idna punycode unicode-escape raw-unicode-escape undefined".split())
"""Codecs of Python that decode text, but are not charsets of files."""
_CHARSET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+ -]{0,39}")
CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""Control characters, for `str.translate`."""
_SURROGATES = re.compile("[\ud800-\udfff]")


def check_encoding(name: str, field: str) -> str:
    """Python's name of a charset. Raises InvalidArgument naming `field` if it is unknown."""
    found, is_charset = None, True
    try:
        if not _CHARSET.fullmatch(name):  # Python keeps the names of all lookups, failed ones included
            raise LookupError
        found = codecs.lookup(name)
        is_charset = found.name.replace("_", "-") not in _NOT_CHARSETS
        b" ".decode(name)  # a codec from bytes to bytes, such as hex, is a LookupError
    except UnicodeDecodeError:  # one byte is too little for UTF-16
        pass
    except (LookupError, ValueError, OSError):  # a confined process imports no further modules
        is_charset, found = False, None
    if found is None or not is_charset:
        raise InvalidArgument(field, f"{printable(name)[:100]!r} is not a known charset, such as utf-8 or iso-8859-1")
    return found.name


def bom_of(head: bytes) -> tuple[int, str]:
    """Length of the byte order mark and the encoding that it declares; (0, "") without one."""
    return next(((len(mark), encoding) for mark, encoding in _BOMS if head.startswith(mark)), (0, ""))


def decode(data: bytes, encoding: str = "") -> str:
    """The text without its byte order mark, which takes precedence over `encoding` (default UTF-8). Raises NotText with
    the offset of the invalid byte."""
    length, declared = bom_of(data)
    used = declared or encoding or "utf-8"
    try:
        return data[length:].decode(used)
    except UnicodeDecodeError as error:
        raise NotText(describe_invalid(used, error, length)) from None


def describe_invalid(encoding: str, error: UnicodeDecodeError, before: int = 0) -> str:
    """The reason with the offset of the invalid byte; `before` bytes precede the decoded ones."""
    title = "UTF-8" if encoding in ("utf-8", "utf-8-sig") else encoding
    return f"is not {title} at byte {before + error.start}: {error.reason}"


def decode_markup(data: bytes) -> str:
    """The text of HTML or XML: the byte order mark, then the charset that the markup declares, then UTF-8, then
    Windows-1252, which browsers assume."""
    length, declared = bom_of(data)
    found = re.search(rb"""(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_.:-]{2,40})""", data[:4096])
    names = [declared, found[1].decode() if found else "", "utf-8"]
    for name in filter(None, names):
        try:
            return data[length:].decode(check_encoding(name, "charset"))
        except (UnicodeDecodeError, InvalidArgument):
            continue
    return data[length:].decode("cp1252", errors="replace")


def without_controls(text: str) -> str:
    """Extracted text with line feeds as line ends, and without control characters and lone surrogates."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n").translate(CONTROLS)
    return _SURROGATES.sub("\ufffd", text)


def find_invalid_utf8(path: Path) -> str:
    """The reason why a file is not UTF-8, with the offset of the first invalid byte; empty if it is UTF-8."""
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    num_pending = 0
    """Bytes of an incomplete character at the end of the last piece."""
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                num_pending = len(decoder.getstate()[0])
                decoder.decode(piece)
                start += len(piece)
        num_pending = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return describe_invalid("utf-8", error, max(0, start - num_pending))
    return ""
