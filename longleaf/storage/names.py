"""Object names, which are never reused.

    services/<service>/segments/<segment>/<attempt>/piece-00012.safetensors
    services/<service>/segments/<segment>/<attempt>/manifest
    services/<service>/notes/<context>/<number, 20 digits>

An attempt is one try to store a segment; objects of an earlier attempt are never overwritten. Segments of one imported
archive share the attempt's name, which marks the import.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

SERVICES = "services"
MANIFEST = "manifest"
_ID = "[a-z0-9][a-z0-9-]{0,99}"
_ID_TEXT = re.compile(_ID)
_MANIFEST = re.compile(rf"services/({_ID})/segments/({_ID})/({_ID})/manifest")
_PIECE = re.compile(rf"services/({_ID})/segments/({_ID})/({_ID})/(?:piece|windows)-[0-9]{{5,}}\.safetensors")
_NOTE = re.compile(rf"services/({_ID})/notes/([^/]+)/([0-9]{{20}})")


IMPORTED = "import-"
"""Prefix of the attempts of imports."""


class Attempt(NamedTuple):
    """One try to store one segment; all three fields consist of a-z 0-9 -."""

    service: str
    segment: str
    attempt: str

    @property
    def is_imported(self) -> bool:
        """Whether the keys and values came from an archive: one damaged segment invalidates the whole archive."""
        return self.attempt.startswith(IMPORTED)

    @property
    def manifest(self) -> str:
        return f"{self._folder}/{MANIFEST}"

    def piece(self, number: int) -> str:
        return f"{self._folder}/piece-{number:05}.safetensors"

    def windows(self, number: int) -> str:
        """The name of a piece of sliding-window layers."""
        return f"{self._folder}/windows-{number:05}.safetensors"

    @property
    def _folder(self) -> str:
        return f"{segments_folder(self.service)}/{self.segment}/{self.attempt}"


class NotePlace(NamedTuple):
    """Context and number of a note."""

    service: str
    context: str
    number: int

    @property
    def name(self) -> str:
        return f"{notes_folder(self.service)}/{quote(self.context, safe='')}/{self.number:020}"


def is_id(text: str) -> bool:
    """Whether it is a valid id of a service or a segment."""
    return _ID_TEXT.fullmatch(text) is not None


def segments_folder(service: str) -> str:
    return f"{SERVICES}/{service}/segments"


def segment_name(service: str, number: int) -> str:
    """The name of the segment with this id in the catalog of a service."""
    return f"{service}-{number}"


def segment_number(service: str, name: str) -> int | None:
    """The id of a segment in the catalog of a service; None for segments of other services."""
    number = name.removeprefix(f"{service}-")
    return int(number) if name != number and number.isdecimal() and number.isascii() else None


def notes_folder(service: str) -> str:
    return f"{SERVICES}/{service}/notes"


def attempt_of_manifest(name: str) -> Attempt | None:
    """None for other names."""
    match = _MANIFEST.fullmatch(name)
    return match and Attempt(*match.groups())


def attempt_of_piece(name: str) -> Attempt | None:
    """None for other names."""
    match = _PIECE.fullmatch(name)
    return match and Attempt(*match.groups())


def place_of_note(name: str) -> NotePlace | None:
    """None for other names."""
    match = _NOTE.fullmatch(name)
    return match and NotePlace(match[1], unquote(match[2]), int(match[3]))
