"""Messages from the extraction process: msgpack with a length before each."""

from typing import Literal

import msgspec

from longleaf.documents.limits import ExtractionLimits

LENGTH_BYTES = 4
MAX_TEXT = 1 << 18
"""Characters per message."""
MAX_MESSAGE = 8 * MAX_TEXT
Mechanism = Literal["limits", "namespaces", "filter"]


class ExtractionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of the process, as JSON. The file is its standard input."""

    name: str
    """For the kind, and for the names of members."""
    limits: ExtractionLimits
    encoding: str = ""
    """Charset of text without a byte order mark; empty: UTF-8."""
    as_text: bool = False
    """HTML pages and notebooks are read as plain text."""
    declared: str = ""
    """The media type that a client declared; empty: none."""


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """The first message: the parsers start now, under these restrictions."""

    by: tuple[Mechanism, ...]


class MemberStarted(msgspec.Struct, frozen=True, tag="member"):
    """The following texts belong to this member of the archive; empty: to the file itself."""

    path: str


class TextFound(msgspec.Struct, frozen=True, tag="text"):
    """A piece of the text of a section. A label is repeated for each piece of the section."""

    label: str
    text: str


class MemberSkipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A member without text, with the reason, which is a predicate of the member."""

    path: str
    reason: str


class Remark(msgspec.Struct, frozen=True, tag="remark"):
    """A remark about a file with text, which is a predicate of it."""

    path: str
    remark: str


class ExtractionEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The last message. With a reason, the file has no text or was not read to its end."""

    reason: str = ""


Message = Confined | MemberStarted | TextFound | MemberSkipped | Remark | ExtractionEnded
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
