"""Names of what is kept: none is ever used for two things.

    services/<service>/segments/<segment>/<attempt>/piece-00012.safetensors
    services/<service>/segments/<segment>/<attempt>/manifest
    services/<service>/notes/<context>/<number, 20 digits>

An attempt is one try to keep a segment: what another one left behind is never written again. Segments of one imported
archive share the attempt's name, which says so.
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
"""How the attempts of imports begin."""


class Attempt(NamedTuple):
    """One try to keep one segment; all three of a-z 0-9 -."""

    service: str
    segment: str
    attempt: str

    @property
    def is_imported(self) -> bool:
        """Whether the keys and values came with an archive: one damaged segment discredits all of it."""
        return self.attempt.startswith(IMPORTED)

    @property
    def manifest(self) -> str:
        return f"{self._folder}/{MANIFEST}"

    def piece(self, number: int) -> str:
        return f"{self._folder}/piece-{number:05}.safetensors"

    def windows(self, number: int) -> str:
        """The name of a piece of windowed layers."""
        return f"{self._folder}/windows-{number:05}.safetensors"

    @property
    def _folder(self) -> str:
        return f"{segments_folder(self.service)}/{self.segment}/{self.attempt}"


class NotePlace(NamedTuple):
    """Which change of which context a note tells."""

    service: str
    context: str
    number: int

    @property
    def name(self) -> str:
        return f"{notes_folder(self.service)}/{quote(self.context, safe='')}/{self.number:020}"


def is_id(text: str) -> bool:
    """Whether a service or a segment may be called so."""
    return _ID_TEXT.fullmatch(text) is not None


def segments_folder(service: str) -> str:
    return f"{SERVICES}/{service}/segments"


def notes_folder(service: str) -> str:
    return f"{SERVICES}/{service}/notes"


def attempt_of_manifest(name: str) -> Attempt | None:
    """None for what is no manifest's name."""
    match = _MANIFEST.fullmatch(name)
    return match and Attempt(*match.groups())


def attempt_of_piece(name: str) -> Attempt | None:
    """None for what is no piece's name."""
    match = _PIECE.fullmatch(name)
    return match and Attempt(*match.groups())


def place_of_note(name: str) -> NotePlace | None:
    """None for what is no note's name."""
    match = _NOTE.fullmatch(name)
    return match and NotePlace(match[1], unquote(match[2]), int(match[3]))
