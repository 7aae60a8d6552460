"""Tokenizes a document while it arrives."""

import codecs
from array import array
from collections.abc import Sequence

from coordinator.handlers.size_limits import SizeLimit
from coordinator.text.encoder import Encoder, StablePrefix
from coordinator.text.tokenizer_pool import STEP_CHARACTERS
from coordinator.text.vocabulary import check_known
from longleaf.document_text import DocumentText, TextFile, check_files, file_bytes
from longleaf.errors import InvalidArgument
from longleaf.little_endian import pack

STEP_BYTES = 1 << 16
"""Most bytes of text per call."""
SIZE = "config.total_size_bytes"
FILES = "config.files"
"""Path of the field in the request."""


class IncompleteDocument(InvalidArgument):
    """Fewer bytes have arrived than were declared; the rest may still arrive."""


class DocumentTokenizer:
    """A document of text or token ids, received in chunks. Only a window of the text is held; the rest is held as ids.

    `receive` is fast; `digest`, `add_ids` and `finish` are not: call them in a thread, one at a time. With at most
    STEP_BYTES or STEP_TOKENS per call each takes tens of milliseconds.
    """

    def __init__(
        self, encoder: Encoder, limit: SizeLimit, vocabulary_size: int, files: Sequence[TextFile] = ()
    ) -> None:
        """`files` are the files of which the text consists. Raises InvalidArgument if they are invalid."""
        check_files(files, FILES)
        self._files = tuple(files)
        self._file_bytes = file_bytes(self._files)
        self._encoder = encoder
        self._limit = limit
        self._vocabulary_size = vocabulary_size
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._waiting: list[str] = []
        self._num_waiting = 0
        self._ids = array("I")
        self._num_checked = len(encoder.token_ids)
        self._is_complete = False
        self._declared: int | None = None
        """Declared size of the text in bytes."""
        self.num_bytes = 0
        """Bytes of text received."""

    @property
    def token_ids(self) -> "array[int]":
        """Ids received, or ids of the text so far."""
        return self._ids or self._encoder.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.num_bytes or self._ids else 0

    @property
    def stable(self) -> StablePrefix | None:
        """The prefix of `token_ids` that later text cannot change; all of them for a document of ids. None if there is
        no such prefix."""
        if self._ids:
            return StablePrefix(0, 0)
        stable = self._encoder.stable
        return stable if stable.num_bytes and not self._is_complete else None

    @property
    def starts(self) -> "array[int]":
        """Byte offsets at which tokens begin, for those tokens whose offset is stored; see
        `coordinator.text.token_offsets`."""
        return self._encoder.starts.starts if self._encoder.starts is not None else array("Q")

    @property
    def text(self) -> DocumentText | None:
        """The description of the complete text. None for a document of ids, and for a resumed one without stored token
        offsets."""
        starts = self._encoder.starts
        if self._ids or starts is None or not starts.is_whole(len(self.token_ids)):
            return None
        return DocumentText(
            num_lead=starts.num_lead(self.token_ids),
            starts=pack(starts.starts).tobytes(),
            num_bytes=self.num_bytes,
            files=self._files,
        )

    def resume(self, token_ids: "array[int]", stable: StablePrefix, starts: "array[int] | None" = None) -> None:
        """Resumes the state of another tokenizer of the same document, of text or ids. `starts` are its stored token
        offsets."""
        if stable.num_bytes:
            self._encoder.resume(token_ids, stable)
            if self._encoder.starts is not None:
                self._encoder.starts.resume(array("Q") if starts is None else starts, len(token_ids))
            self.num_bytes, self._num_checked = stable.num_bytes, len(token_ids)
        else:
            self._ids = token_ids

    @property
    def should_flush(self) -> bool:
        """Whether enough text is buffered for `digest`."""
        return self._num_waiting >= STEP_CHARACTERS

    @property
    def num_buffered_bytes(self) -> int:
        """Approximate bytes of memory held."""
        return 4 * (self.num_tokens + self._encoder.num_buffered + self._num_waiting) + self._file_bytes

    def expect(self, num_bytes: int | None) -> None:
        """Sets the declared size, if given. Raises InvalidArgument if it is negative, can never fit, differs from an
        earlier declaration, or is less than the bytes received."""
        if num_bytes is None:
            return
        if num_bytes < 0:
            raise InvalidArgument(SIZE, f"{num_bytes} is negative")
        if self._declared not in (None, num_bytes):
            raise InvalidArgument(
                SIZE, f"{num_bytes:,} bytes are declared, but {self._declared:,} were declared before"
            )
        self._limit.check(SIZE, num_bytes)
        self._check_size(num_bytes, self.num_bytes)
        self._declared = num_bytes

    def _check_size(self, declared: int | None, num_bytes: int) -> None:
        if declared is not None and num_bytes > declared:
            raise InvalidArgument(SIZE, f"{declared:,} bytes are declared, but {num_bytes:,} have been received")

    def check_size(self) -> None:
        """Checks the size at the end. Raises IncompleteDocument if fewer bytes arrived than were declared."""
        if self._declared is not None and self.num_bytes < self._declared:
            raise IncompleteDocument(
                SIZE, f"{self._declared:,} bytes are declared, but the text ended after {self.num_bytes:,}"
            )

    def receive(self, text: bytes) -> None:
        """Adds UTF-8 text, at most STEP_BYTES. Raises InvalidArgument if it is not UTF-8, cannot fit, exceeds the
        declared size, or follows ids."""
        self._check_open("text")
        if self._ids:
            raise InvalidArgument("text", "cannot be mixed with token_ids")
        self._check_size(self._declared, self.num_bytes + len(text))
        self._limit.check("text", self.num_bytes + len(text))
        self._decode(text)
        self.num_bytes += len(text)

    def add_ids(self, token_ids: Sequence[int], offset: int = 0) -> None:
        """Adds ids, at most STEP_TOKENS, that follow `offset` others in their message.

        Raises InvalidArgument if they cannot fit, if one is not in the vocabulary, and if text was received or
        declared.
        """
        self._check_open("token_ids")
        if self.num_bytes:
            raise InvalidArgument("token_ids", "cannot be mixed with text")
        if self._declared:
            raise InvalidArgument(SIZE, f"{self._declared:,} bytes of text are declared, but token_ids were sent")
        if self._files:
            raise InvalidArgument(FILES, "require text, and token_ids were sent")
        self._limit.check_tokens("token_ids", len(self._ids) + len(token_ids))
        check_known(token_ids, self._vocabulary_size, offset=offset)
        self._ids.extend(token_ids)

    def digest(self) -> None:
        """Tokenizes the buffered text. Raises InvalidArgument if it cannot fit."""
        text, self._waiting, self._num_waiting = "".join(self._waiting), [], 0
        self._encoder.push(text)
        self._check_text()

    def finish(self) -> None:
        """Completes the document. Raises the errors of `digest`, and InvalidArgument for an empty document or text that
        ends within a character. Idempotent."""
        self._decode(b"", is_last=True)
        self.digest()
        self._encoder.finish()
        self._check_text()
        if self._files and self._files[-1].start > self.num_bytes:
            message = f"{self._files[-1].start:,} is past the end of the text, which has {self.num_bytes:,} bytes"
            raise InvalidArgument(f"{FILES}[{len(self._files) - 1}].byte_start", message)
        if not self.num_tokens:
            raise InvalidArgument("text", "has no tokens" if self.num_bytes else "the document is empty")
        self._is_complete = True

    def _check_open(self, field: str) -> None:
        if self._is_complete:
            raise InvalidArgument(field, "the document is complete; no more input is accepted")

    def _decode(self, text: bytes, is_last: bool = False) -> None:
        resident = len(self._decoder.getstate()[0])  # the start of a character, from the previous chunk
        try:
            decoded = self._decoder.decode(text, is_last)
        except UnicodeDecodeError as error:
            offset = self.num_bytes - resident + error.start
            raise InvalidArgument("text", f"is not UTF-8 at byte {offset}: {error.reason}") from None
        self._waiting.append(decoded)
        self._num_waiting += len(decoded)

    def _check_text(self) -> None:
        token_ids = self._encoder.token_ids
        self._limit.check_tokens("text", len(token_ids))
        new = token_ids[self._num_checked :]
        self._num_checked = len(token_ids)
        check_known(new, self._vocabulary_size, "text")
