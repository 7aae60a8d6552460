"""Text of a context or of a range of it, decoded from its token ids, because text is not stored."""

from typing import TYPE_CHECKING

from coordinator.text.text_map import TextMap, TextRange
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import FailedPrecondition, InvalidArgument
from longleaf.tenants import name_of
from longleaf.types import ContextText, GetContextText, TextUnit

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine

MAX_BYTES = 1 << 20
MAX_TOKENS = 1 << 18
"""Maximum number of tokens in a range."""
FIELDS: dict[TextUnit, str] = {"tokens": "token_range", "bytes": "byte_range"}
STEP_TOKENS = 1 << 15
"""Tokens per step when lines are counted."""


class ContextTexts:
    """Decodes in `threads`, in steps; a cancelled call ends between two steps."""

    def __init__(self, engine: "Engine", tokenizer: Tokenizer, threads: TokenizerPool) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._threads = threads

    def map_of(self, context_id: str) -> TextMap:
        """Maps tokens of the context to its text. Raises the errors of the engine."""
        return TextMap(self._engine.text_parts(context_id), self._tokenizer.alphabet)

    async def read(self, wanted: GetContextText) -> ContextText:
        """Raises InvalidArgument for a range outside of the context or too long, FailedPrecondition for a byte range of
        a context without a text, and the errors of the engine."""
        found = self.map_of(wanted.context)
        _check(wanted, found)
        passage = await self._threads.run(_read, found, wanted)
        size = len(passage.text.encode())
        if size > MAX_BYTES and wanted.unit == "tokens":
            raise InvalidArgument(
                FIELDS[wanted.unit], f"has {size:,} bytes of text; the limit for one call is {MAX_BYTES:,}"
            )
        start, end = passage.bytes or (None, None)
        file, last_file = found.file_names(start, end) if start is not None and end is not None else ("", "")
        return ContextText(
            text=passage.text,
            token_start=passage.tokens[0],
            token_end=passage.tokens[1],
            byte_start=start,
            byte_end=end,
            file=file,
            line=None if start is None else await self._line(found, start),
            last_file=last_file,
        )

    async def _line(self, found: TextMap, byte: int) -> int | None:
        """Number of the line that contains a byte; decodes all of the file before it."""
        if (lines := found.lines_at(byte)) is None:
            return None
        while not lines.is_over:
            await self._threads.run(lines.step, STEP_TOKENS)
        return lines.line


def _read(found: TextMap, wanted: GetContextText) -> TextRange:
    if wanted.unit == "tokens":
        return found.read(wanted.start, wanted.end)
    return found.read_bytes(wanted.start, wanted.end)


def _check(wanted: GetContextText, found: TextMap) -> None:
    """Raises InvalidArgument and FailedPrecondition."""
    is_bytes, field = wanted.unit == "bytes", FIELDS[wanted.unit]
    name, most, longest = f"contexts/{name_of(wanted.context)}", found.num_tokens, MAX_TOKENS
    if is_bytes:
        most, longest = found.num_bytes, MAX_BYTES
        if not most:
            raise FailedPrecondition(name, "byte ranges need text, but it was ingested as token ids: use token_range")
    if not 0 <= wanted.start <= wanted.end <= most:
        message = f"[{wanted.start:,}, {wanted.end:,}) is not in [0, {most:,}), the {wanted.unit} of {name}"
        raise InvalidArgument(field, message)
    if wanted.end - wanted.start > longest:
        message = f"has {wanted.end - wanted.start:,} {wanted.unit}; the limit for one call is {longest:,}"
        raise InvalidArgument(field, message)
