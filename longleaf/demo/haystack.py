"""Documents of real text with planted facts, and the questions to ask. A token of the demo's model is a byte."""

import os
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longleaf.demo.facts import Fact, absent_fact, evaluation_fact

Split = Literal["all", "train", "held_out"]

SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"})
"""Folders that contain no useful text, or do not belong to the standard library."""

DEFAULT_TOKENS = 200_000
DISTRACTOR_EVERY = 5000
"""Tokens of document per distractor fact."""


@dataclass(frozen=True)
class Haystack:
    """A document and questions about it."""

    text: str
    facts: tuple[Fact, ...]
    """Facts that the text states exactly once, in the text's order."""
    offsets: tuple[int, ...]
    """Where each fact's sentence begins, in bytes of the UTF-8 text."""
    absent: tuple[Fact, ...]
    """Questions whose key is not in the text."""


def in_split(name: str, split: Split) -> bool:
    """Whether training (`train`), evaluation (`held_out`) or either (`all`) may read the file called `name`."""
    held_out = zlib.crc32(name.encode()) % 10 == 0
    return split == "all" or held_out == (split == "held_out")


def library_files(split: Split = "all") -> list[Path]:
    """Source files of the Python standard library on this machine, sorted, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in found if in_split(path.relative_to(root).as_posix(), split))


def library_texts(rng: random.Random, split: Split = "all") -> Iterator[str]:
    """Texts of the standard library's files in a random order, without end; undecodable files are skipped."""
    files = library_files(split)
    if not files:
        raise FileNotFoundError("this Python has no source files of its standard library")
    while True:
        rng.shuffle(files)
        for path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text:
                yield text


def cut(text: str, size: int) -> str:
    """The longest beginning of `text` of at most `size` UTF-8 bytes."""
    return text.encode()[:size].decode(errors="ignore")


def library_text(rng: random.Random, size: int, split: Split = "all") -> str:
    """Text of the standard library, `size` UTF-8 bytes or up to 3 fewer."""
    parts: list[str] = []
    missing = size
    for text in library_texts(rng, split):
        parts.append(cut(text, missing))
        missing -= len(parts[-1].encode())
        if missing < 4:
            return "".join(parts)
    raise AssertionError("library_texts never ends")


def places(text: str, count: int) -> list[int]:
    """Character offsets at which a sentence may be inserted, including 0.

    Beginnings of lines; if there are fewer than `count`, beginnings of words; otherwise any offset.
    """
    for pattern in (r"(?<=\n)", r"(?<=\s)(?=\S)"):
        found = [0, *(match.start() for match in re.finditer(pattern, text))]
        if len(found) > count:
            return found
    return list(range(len(text) + 1))


def spread(rng: random.Random, starts: Sequence[int], count: int) -> list[int]:
    """`count` of the offsets, ascending: one at random from each of `count` equal shares of them."""
    share = len(starts) / count
    return [starts[min(int((i + rng.random()) * share), len(starts) - 1)] for i in range(count)]


def plant(rng: random.Random, text: str, sentences: Sequence[str]) -> str:
    """The text with each sentence as a separate line, in the given order, spread over the whole text."""
    parts: list[str] = []
    last = 0
    chosen = spread(rng, places(text, len(sentences)), len(sentences)) if sentences else []
    for place, sentence in zip(chosen, sentences, strict=True):
        before = text[last:place]
        parts += [before, "" if text[place - 1 : place] in ("", "\n") else "\n", sentence, "\n"]
        last = place
    return "".join([*parts, text[last:]])


def num_spare_bytes(sentences: Iterable[str], size: int) -> int:
    """Bytes that `sentences`, planted as lines, leave of `size`."""
    return max(0, size - sum(len(sentence.encode()) + 1 for sentence in sentences))


def canonical(key: str) -> str:
    """The key in lower case and without separators."""
    return re.sub(r"[ _-]", "", key.lower())


def distinct_facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts of `count` keys that differ in more than their spelling, and as many different values."""
    chosen: dict[str, Fact] = {}
    values: set[str] = set()
    while len(chosen) < count:
        fact = evaluation_fact(rng)
        if fact.value not in values and canonical(fact.key) not in chosen:
            chosen[canonical(fact.key)] = fact
            values.add(fact.value)
    return list(chosen.values())


def make_haystack(seed: int, tokens: int, facts: int = 5, absent: int = 1, split: Split = "all") -> Haystack:
    """A document of about `tokens` tokens with `facts` facts to ask for, distractor facts, and `absent` absent keys."""
    rng = random.Random(seed)
    everything = distinct_facts(rng, facts + tokens // DISTRACTOR_EVERY)
    filler = num_spare_bytes([fact.sentence for fact in everything], tokens)
    return build_haystack(rng, library_text(rng, filler, split), everything, facts, absent)


def build_haystack(
    rng: random.Random, text: str, everything: Sequence[Fact], num_questions: int, absent: int
) -> Haystack:
    """`text` with all facts, `num_questions` questions about them, and `absent` keys that are not in the text."""
    wanted = [everything[i] for i in sorted(rng.sample(range(len(everything)), num_questions))]
    planted = plant(rng, text, [fact.sentence for fact in everything])
    missing: list[Fact] = []
    while len(missing) < absent:
        fact = absent_fact(rng)
        if canonical(fact.key) not in canonical(planted):
            missing.append(fact)
    data = planted.encode()
    offsets = tuple(data.index(fact.sentence.encode()) for fact in wanted)
    return Haystack(planted, tuple(wanted), offsets, tuple(missing))
