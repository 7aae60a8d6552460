"""Control tokens, and their separation from client text that looks like one.

Control tokens are the special tokens, and other added tokens that the chat template writes, such as `<tool_call>`;
tokens of white space are excluded. transformers uses the same definition and method (`apply_chat_template` with
`sanitize_control_tokens`): each control token in a client's text is put between marks, templates are rendered with the
marked texts, and text between marks is encoded as plain text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longleaf.errors import InvalidArgument, ModelRefused

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters, which Unicode reserves for internal use."""


class TemplatePiece(NamedTuple):
    """A part of a rendered prompt."""

    text: str
    is_plain: bool = False
    """Whether control tokens in it are text."""


class Marks(NamedTuple):
    """Characters that occur in no text of a conversation."""

    start: str
    end: str
    document: str
    """Placeholder of a document."""
    edge: str
    """A mark between a text and its surroundings, which keeps them apart."""

    @classmethod
    def beside(cls, texts: Iterable[str]) -> "Marks":
        """Raises InvalidArgument naming `text` where texts contain nearly all of NONCHARACTERS."""
        used = {each for text in texts if not text.isascii() for each in NONCHARACTERS if each in text}
        free = [each for each in NONCHARACTERS if each not in used]
        if len(free) < len(cls._fields):
            raise InvalidArgument("text", "has too many noncharacters (U+FDD0 to U+FDEF)")
        return cls(*free[: len(cls._fields)])


class ControlTokens:
    """The control tokens of a model."""

    def __init__(self, contents: Iterable[str]) -> None:
        """Raises ModelRefused for tokens of thousands of characters."""
        words = sorted({content for content in contents if content})
        try:
            self._pattern = re.compile(_alternatives(words) or "(?!)")
        except RecursionError:
            raise ModelRefused("tokenizer.json has added tokens that are too long") from None
        self._beginnings = {word[:size] for word in words for size in range(1, len(word))}
        self._ends = {word[size:] for word in words for size in range(1, len(word))}
        self._longest = max(map(len, words), default=0)

    def count(self, text: str) -> int:
        """Number of control tokens in a text."""
        return sum(1 for _ in self._pattern.finditer(text))

    def mark(self, text: str, marks: Marks) -> str:
        """`text` with marks around each control token."""
        return self._pattern.sub(lambda found: f"{marks.start}{found[0]}{marks.end}", text)

    def mark_edges(self, text: str, marks: Marks) -> str:
        """`text` with a mark where it could form a control token with adjacent text."""
        before = any(text[:size] in self._ends for size in range(1, self._longest))
        after = any(text[-size:] in self._beginnings for size in range(1, self._longest))
        return f"{marks.edge if before else ''}{text}{marks.edge if after else ''}"

    def split(self, rendered: str, marks: Marks) -> list[TemplatePiece]:
        """Splits a rendered text at its marks. A mark that is not next to a whole control token, because a template
        split a text there, is dropped, but still separates."""
        alone = f"[{marks.start}{marks.end}{marks.edge}]"
        pieces = re.split(f"{marks.start}({self._pattern.pattern}){marks.end}|{alone}", rendered)
        return [TemplatePiece(text, i % 2 == 1) for i, text in enumerate(pieces) if text]


def _alternatives(words: Sequence[str]) -> str:
    """A pattern for any of the words, longest first, that decides at each character. Trying a thousand words one by one
    at each `<` would be slow."""
    if not words:
        return ""
    prefix = words[0]
    for word in words:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    rests = [word[len(prefix) :] for word in words]
    by_first: dict[str, list[str]] = {}
    for rest in rests:
        if rest:
            by_first.setdefault(rest[0], []).append(rest)
    if not by_first:
        return re.escape(prefix)
    choice = "|".join(_alternatives(group) for group in by_first.values())
    return f"{re.escape(prefix)}(?:{choice}){'?' if '' in rests else ''}"
