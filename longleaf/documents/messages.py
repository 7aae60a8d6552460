"""Messages from the extraction process: msgpack with a length before each."""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from longleaf.documents.limits import ExtractionLimits

LENGTH_BYTES = 4
MAX_TEXT = 1 << 18
"""Characters per message."""
MAX_MESSAGE = 8 * MAX_TEXT
MAX_PATH = 2048
"""Characters of the path of a member, which contains the names of its archives."""
MAX_LABEL = 100
MAX_REASON = 500
Mechanism = Literal["limits", "namespaces", "filter"]
MemberPath = Annotated[str, Meta(max_length=MAX_PATH)]
Label = Annotated[str, Meta(max_length=MAX_LABEL)]
Predicate = Annotated[str, Meta(max_length=MAX_REASON)]


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

    by: Annotated[tuple[Mechanism, ...], Meta(max_length=len(get_args(Mechanism)))]


class MemberStarted(msgspec.Struct, frozen=True, tag="member"):
    """The following texts belong to this member of the archive; empty: to the file itself."""

    path: MemberPath


class TextFound(msgspec.Struct, frozen=True, tag="text"):
    """A piece of the text of a section. A label is repeated for each piece of the section."""

    label: Label
    text: str


class MemberSkipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A member without text, with the reason, which is a predicate of the member."""

    path: MemberPath
    reason: Predicate


class Remark(msgspec.Struct, frozen=True, tag="remark"):
    """A remark about a file with text, which is a predicate of it."""

    path: MemberPath
    remark: Predicate


class ExtractionEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The last message. With a reason, the file has no text or was not read to its end."""

    reason: Predicate = ""


Message = Confined | MemberStarted | TextFound | MemberSkipped | Remark | ExtractionEnded
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
