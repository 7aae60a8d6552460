"""Text that the embedded model is trained on: prose and code of the standard library, and words of all kinds."""

import ast
import random
import re
from pydoc_data.topics import topics

from longleaf.demo.facts import EVALUATION_WORDS, WORDS
from longleaf.demo.haystack import library_files

TRAIN_WORDS = tuple(word for word in WORDS if word not in EVALUATION_WORDS)
LETTERS = ("bcdfghjklmnprstvwz", "aeiou", "çñšžłß", "áéíöüø", "бвгдклмнпрст", "аеиоу")


def docstrings(source: str) -> list[str]:
    """Documentation strings of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text for text in found if text and len(text) > 40]


def filler_texts() -> tuple[bytes, bytes]:
    """Prose (documentation strings and topics) and source code of the files that training may read."""
    prose = [str(text) for text in topics.values()]
    code: list[str] = []
    for path in library_files("train"):
        if path.name == "topics.py":
            continue
        try:
            source = path.read_text(encoding="utf-8")
            prose += docstrings(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        code.append(source)
    random.Random(0).shuffle(prose)
    return "\n\n".join(prose).encode(), "\n".join(code).encode()


def made_up_word(rng: random.Random) -> str:
    """A word of two to four syllables, one in six with letters outside ASCII."""
    script = 0 if rng.random() < 0.83 else rng.choice((2, 4))
    syllables = rng.randint(2, 4 if script == 0 else 3)
    return "".join(rng.choice(LETTERS[script]) + rng.choice(LETTERS[script + 1]) for _ in range(syllables))


class Text:
    """Draws text and words."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.prose, self.code = filler_texts()
        found = set(re.findall(r"\b[a-z]{4,10}\b", self.prose.decode()))
        self.common = tuple(sorted(found - set(EVALUATION_WORDS)))
        self.pool: tuple[str, ...] = ()
        """Words that keys and values of the batch share."""

    def filler(self, size: int) -> bytes:
        """`size` bytes of prose or code that begin and end at a UTF-8 character."""
        source = self.prose if self.rng.random() < 0.5 else self.code
        start = self.rng.randrange(len(source) - size - 1)
        text = source[start : start + size].decode(errors="ignore").encode()
        return text + b"\n" * (size - len(text))

    def made_up_text(self, size: int) -> bytes:
        """`size` bytes of words, numbers and hexadecimal digits in no order."""
        text = b""
        while len(text) < size:
            number = str(self.rng.randrange(10**6)), f"{self.rng.getrandbits(24):06x}"
            text += self.rng.choice((self.word(), self.word(), *number)).encode() + self.rng.choice(
                (b" ", b" ", b"\n", b": ")
            )
        return text[:size]

    def word(self) -> str:
        """A word, most often one that other facts of the batch have too."""
        return self.rng.choice(self.pool) if self.pool and self.rng.random() < 0.75 else self.new_word()

    def new_word(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return self.rng.choice(TRAIN_WORDS)
        return self.rng.choice(self.common) if kind < 0.7 else made_up_word(self.rng)
