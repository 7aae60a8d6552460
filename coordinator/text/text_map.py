"""Maps tokens of a context to bytes of its text, and bytes to tokens, files and lines; returns parts of the text.

Stored are the ids of a text, and the offset of every STRIDE-th token (longleaf.document_text). Between two stored
offsets, the bytes of single tokens are added up. That is exact wherever their sum equals the distance of the offsets,
which is always so for byte-level tokenizers. Where a normaliser has changed the text, it is an estimate between them,
off by at most one STRIDE.

Bytes are counted through all texts of the context in order. Tokens given as ids have no bytes.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from coordinator.engine_messages import DocumentPart
from coordinator.text.detokenizer import Alphabet
from longleaf.document_text import STRIDE, file_at

CHARACTER_BYTES = 4
"""Maximum bytes of a UTF-8 character."""
NEAR = 16
"""Tokens around a range that are decoded to complete its first and last characters."""


class TextRange(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the text of a context, in whole characters."""

    text: str
    tokens: tuple[int, int]
    """The requested tokens, or those of the requested bytes. A character may begin before or end after them."""
    bytes: tuple[int, int] | None
    """The byte range in the text; None where a part of it was given as ids."""


class TextMap:
    """The text of a context. Positions are those of the context. The time of a query grows with the number of documents
    and the size of the result, but not with the tokens of the context."""

    def __init__(self, parts: Sequence[DocumentPart], alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._documents = list(_documents(parts, alphabet))
        self._texts = [document for document in self._documents if document.num_bytes]
        last = self._documents[-1] if self._documents else None
        self.num_tokens = last.start + last.num_tokens if last else 0
        self.num_bytes = last.first_byte + last.num_bytes if last else 0
        """Bytes of all texts."""

    def bytes_of(self, token_start: int, token_end: int) -> tuple[int, int] | None:
        """Return the byte range of tokens [start, end); None where some of them were given as ids."""
        assert 0 <= token_start <= token_end <= self.num_tokens
        first, last = self._document_index(token_start), self._document_index(max(token_start, token_end - 1))
        if any(document.text is None for document in self._documents[first : last + 1]):
            return None
        return self._byte(first, token_start), self._byte(last, token_end)

    def tokens_of(self, byte_start: int, byte_end: int) -> tuple[int, int]:
        """Return the smallest token range that contains the bytes [start, end)."""
        assert 0 <= byte_start <= byte_end <= self.num_bytes
        if byte_start == byte_end:
            position = self._token_at(byte_start)
            return position, position
        return self._token_at(byte_start), self._token_at(byte_end - 1) + 1

    def file_names(self, byte_start: int, byte_end: int) -> tuple[str, str]:
        """Return the name of the file with the first byte, and that of the file with the last byte if it is another.
        Empty names stand for unknown files, and for the second file if there is none.
        """
        first = self._file_name(byte_start)
        last = self._file_name(max(byte_start, byte_end - 1))
        return first, last if last != first else ""

    def read(self, token_start: int, token_end: int) -> TextRange:
        """Return the text of tokens [start, end)."""
        return self._read((token_start, token_end), self.bytes_of(token_start, token_end), 0, 0)

    def read_bytes(self, byte_start: int, byte_end: int) -> TextRange:
        """Return the text of bytes [start, end), or of all of their tokens where the spelling differs from the source
        text.
        """
        tokens = self.tokens_of(byte_start, byte_end)
        found = self.bytes_of(*tokens)
        if found is None:  # ids are in between
            return self._read(tokens, None, 0, 0)
        return self._read(tokens, found, byte_start - found[0], found[1] - byte_end)

    def _read(self, tokens: tuple[int, int], found: tuple[int, int] | None, cut_start: int, cut_end: int) -> TextRange:
        """Return the text of tokens with the byte range `found`, without `cut_start` bytes at the start and `cut_end`
        at the end.
        """
        if self._alphabet.spell is None:
            text = self._alphabet.decode([each for document in self._documents for each in document.ids_of(*tokens)])
            return TextRange(text=text, tokens=tokens, bytes=found)
        before = b"".join(self._token_bytes(max(0, tokens[0] - NEAR), tokens[0]))
        own = b"".join(self._token_bytes(*tokens))
        behind = b"".join(self._token_bytes(tokens[1], min(self.num_tokens, tokens[1] + NEAR)))
        start, end, all_bytes = len(before), len(before) + len(own), before + own + behind
        if found is not None and len(own) == found[1] - found[0]:
            start, end = start + cut_start, end - cut_end
            found = found[0] + cut_start, found[1] - cut_end
        if start == end:
            return TextRange(text="", tokens=tokens, bytes=found)
        first, last = _character_start(all_bytes, start), _character_end(all_bytes, end)
        if found is not None:
            found = found[0] - (start - first), found[1] + (last - end)
        return TextRange(text=all_bytes[first:last].decode(errors="replace"), tokens=tokens, bytes=found)

    def lines_at(self, byte: int) -> "Lines | None":
        """Return a line counter for a byte within its file; None where there is no text."""
        document = self._document_of(byte)
        if document is None or document.text is None:
            return None
        local = byte - document.first_byte
        file = file_at(document.text.files, local)
        return Lines(document, file.start if file else 0, local)

    def _file_name(self, byte: int) -> str:
        """Return the name of the file that contains a byte; empty where the file is unknown."""
        document = self._document_of(byte)
        file = file_at(document.text.files, byte - document.first_byte) if document and document.text else None
        return file.name if file else ""

    def _document_index(self, position: int) -> int:
        """Return the index of the document with the token at a position; the last one at the end."""
        return max(0, bisect_right(self._documents, position, key=lambda each: each.start) - 1)

    def _byte(self, index: int, position: int) -> int:
        document = self._documents[index]
        return document.first_byte + document.byte_at(position - document.start)

    def _document_of(self, byte: int) -> "DocumentMap | None":
        """Return the text that contains a byte; the last one at the end."""
        found = bisect_right(self._texts, byte, key=lambda each: each.first_byte) - 1
        return self._texts[max(0, found)] if self._texts else None

    def _token_at(self, byte: int) -> int:
        document = self._document_of(byte)
        return document.start + document.token_at(byte - document.first_byte) if document else 0

    def _token_bytes(self, start: int, end: int) -> Iterator[bytes]:
        for document in self._documents[self._document_index(start) :]:
            if document.start >= end:
                return
            first = max(0, start - document.start)
            yield from document.token_bytes(first, min(document.num_tokens, end - document.start))


class DocumentMap:
    """The text of one segment. Positions and bytes are relative to it, except `start` and `first_byte`."""

    def __init__(self, part: DocumentPart, start: int, first_byte: int, alphabet: Alphabet) -> None:
        self.start = start
        self.first_byte = first_byte
        self.num_tokens = part.num_tokens
        self.text = part.text
        self._ids = part.token_ids
        self._alphabet = alphabet

    @cached_property
    def num_bytes(self) -> int:
        """Those of the context."""
        return self.byte_at(self.num_tokens) if self.text is not None else 0

    def byte_at(self, position: int) -> int:
        """Return the byte at which a token begins, which is the end of the token before it."""
        text = self.text
        assert text is not None
        if position <= text.num_lead:
            return 0
        if position == len(self._ids) and not text.is_cut:
            return text.num_bytes
        number = position // STRIDE
        if position % STRIDE == 0 and number < text.num_starts:
            return text.start(number)
        return self._stride(number)[position - max(number * STRIDE, text.num_lead)]

    def token_at(self, byte: int) -> int:
        """Return the token that contains a byte; of several that begin there, the last."""
        text = self.text
        assert text is not None
        number = max(0, bisect_right(range(text.num_starts), byte, key=text.start) - 1)
        number = max(number, text.num_lead // STRIDE)
        places = self._stride(number)
        found = max(number * STRIDE, text.num_lead) + bisect_right(places, byte, hi=max(1, len(places) - 1)) - 1
        return min(max(found, text.num_lead), self.num_tokens - 1)

    def _stride(self, number: int) -> list[int]:
        """Where the tokens of a stride begin, and the last of them ends."""
        text = self.text
        assert text is not None
        first = max(number * STRIDE, text.num_lead)
        end = min((number + 1) * STRIDE, len(self._ids))
        low = text.start(number) if number < text.num_starts else text.num_bytes
        high = text.start(number + 1) if number + 1 < text.num_starts else text.num_bytes
        places = [low]
        for piece in self.token_bytes(first, end):
            places.append(places[-1] + len(piece))
        is_cut = text.is_cut and end == len(self._ids)
        if places[-1] == high or (is_cut and places[-1] < high):
            return places
        spread = places[-1] - low  # the spelling differs from the source text
        return [low + (place - low) * (high - low) // spread if spread else low for place in places[:-1]] + [high]

    @cached_property
    def _has_space(self) -> bool:
        """Whether the first token begins with a space that the text has not."""
        text = self.text
        if text is None or text.num_lead >= len(self._ids):
            return False
        number = text.num_lead // STRIDE
        end = min((number + 1) * STRIDE, len(self._ids))
        parts = [self._spell(token_id) for token_id in self._ids[text.num_lead : end]]
        if not parts[0].startswith(b" "):
            return False
        if text.is_cut and end == len(self._ids):  # only the tokenizer can decide in this case
            spell = self._alphabet.spell
            return spell is not None and spell(self._ids[text.num_lead], True) != parts[0]
        high = text.start(number + 1) if number + 1 < text.num_starts else text.num_bytes
        return sum(map(len, parts)) == high + 1

    def ids_of(self, start: int, end: int) -> Sequence[int]:
        """The tokens in [start, end) that belong to this segment."""
        return self._ids[max(0, start - self.start) : max(0, min(self.num_tokens, end - self.start))]

    def token_bytes(self, start: int, end: int) -> Iterator[bytes]:
        """Return the bytes of tokens [start, end)."""
        first = self.text.num_lead if self.text is not None else -1
        for position in range(start, end):
            piece = self._spell(self._ids[position])
            yield piece[1:] if position == first and self._has_space else piece

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._alphabet.silent:
            return b""
        if self._alphabet.spell is not None:
            return self._alphabet.spell(token_id, False)
        return self._alphabet.decode([token_id]).encode()


class Lines:
    """Counts the lines of a file up to a byte, in steps over all tokens in between."""

    def __init__(self, document: DocumentMap, first_byte: int, byte: int) -> None:
        self._document = document
        self._num_bytes = 0
        self._first_byte, self._byte = first_byte, byte
        self._position = document.token_at(first_byte) if byte > first_byte else 0
        self._place = document.byte_at(self._position) if byte > first_byte else byte
        self.line = 1
        """The line so far, from 1."""

    @property
    def is_over(self) -> bool:
        return self._place >= self._byte or self._position >= self._document.num_tokens

    def step(self, num_tokens: int) -> None:
        """Counts those of so many tokens more."""
        end = min(self._position + num_tokens, self._document.num_tokens)
        for piece in self._document.token_bytes(self._position, end):
            if self._place >= self._byte:
                return
            start = max(0, self._first_byte - self._place)
            self.line += piece.count(b"\n", start, self._byte - self._place)
            self._place += len(piece)
        self._position, self._place = end, self._document.byte_at(end)


def _documents(parts: Sequence[DocumentPart], alphabet: Alphabet) -> Iterator[DocumentMap]:
    start = first_byte = 0
    for part in parts:
        document = DocumentMap(part, start, first_byte, alphabet)
        yield document
        start, first_byte = start + part.num_tokens, first_byte + document.num_bytes


def _is_inner(byte: int) -> bool:
    """Return whether the byte continues a UTF-8 character."""
    return 0x80 <= byte < 0xC0


def _num_bytes(first: int) -> int:
    """Return the length in bytes of a UTF-8 character from its first byte."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _character_start(text: bytes, place: int) -> int:
    """Return the start of the character that contains the byte at `place`."""
    for start in range(place, max(-1, place - CHARACTER_BYTES), -1):
        if not _is_inner(text[start]):
            return start if start + _num_bytes(text[start]) > place else place
    return place


def _character_end(text: bytes, place: int) -> int:
    """Return the end of the character that contains the byte before `place`."""
    start = _character_start(text, place - 1)
    end = start + _num_bytes(text[start])
    is_whole = end <= len(text) and all(map(_is_inner, text[place:end]))
    return end if end > place and is_whole else place
