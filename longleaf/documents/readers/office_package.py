"""Checks of Office files, which are zip archives of XML parts, before a library opens them."""

import zipfile
from io import BytesIO

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.limits import ExtractionLimits

DECLARATIONS = tuple(text.encode(encoding) for text in ("<!DOCTYPE", "<!ENTITY") for encoding in ("ascii", "utf-16-le"))
PROLOG_BYTES = 1 << 16
"""An entity must be declared before the root element; Office's own parts begin with it."""
ENCRYPTED = 1


def checked(data: bytes, limits: ExtractionLimits) -> BytesIO:
    """The file for a library. Raises LimitExceeded for too many or too large parts, and Unreadable for a damaged file
    and for a document type definition, which could declare entities."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as package:
            parts = package.infolist()
            if len(parts) > limits.num_members:
                raise LimitExceeded(f"has {len(parts):,} parts; the limit is {limits.num_members:,}")
            num_bytes = sum(part.file_size for part in parts)  # the library reads no more than a part declares
            if num_bytes > limits.member_bytes:
                raise LimitExceeded(f"has {num_bytes:,} decompressed bytes; the limit is {limits.member_bytes:,}")
            if any(part.flag_bits & ENCRYPTED for part in parts):
                raise Unreadable("is encrypted: save it without a password")
            for part in parts:
                if part.filename.lower().endswith((".xml", ".rels")):
                    with package.open(part) as file:
                        prolog = file.read(PROLOG_BYTES)
                    if any(declaration in prolog for declaration in DECLARATIONS):
                        raise Unreadable("has a document type definition, which Office files must not have")
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, OSError) as error:
        raise Unreadable(f"is a damaged file: {error}") from None
    return BytesIO(data)
