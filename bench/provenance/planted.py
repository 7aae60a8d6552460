"""Facts planted in real prose, and questions about them, for pretrained chat models.

The prose is that of two collections that are installed with most Linux systems: the licences in
`/usr/share/common-licenses` and Python's own reference (`pydoc_data.topics`). Documents and questions follow from a
seed; a hash over all of them (`digest`) identifies the set that a result was measured on.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

from bench.needle.documents import Document, Question

LICENCES = Path("/usr/share/common-licenses")
LEAST_PARAGRAPH = 200
"""Bytes. Shorter paragraphs are headings, lists and code."""
PER_DOCUMENT = 5
"""Facts in each document, one in each fifth of it."""
ADJECTIVES = "Blue Silver Northern Old Green Golden Quiet Western Crystal Red Upper Hidden Amber Royal Stone".split()
NOUNS = "Harbor Meadow Falcon River Summit Orchard Lantern Willow Canyon".split()
NOUNS += "Bridge Maple Anchor Forest Valley Eagle".split()
PLACES = "depot library clinic hotel warehouse school museum laboratory station theater".split()
STAFF = "Alice Turner,Robert Hayes,Maria Lopez,David Chen,Emma Brooks,James Porter,Nora Bennett,Peter Walsh".split(",")
CITIES = "Lisbon,Denver,Oslo,Chicago,Madrid,Toronto,Vienna,Boston,Prague,Seattle,Dublin,Geneva".split(",")
DISHES = "lasagna,pumpkin soup,apple pie,chicken curry,tomato salad,fish stew,onion rings,potato pancakes".split(",")
ANIMALS = "penguin giraffe hedgehog dolphin kangaroo panther walrus beaver".split()
KINDS = (
    ("The access code of the {name} is {value}.", "What is the access code of the {name}?", "number"),
    ("The phone extension of the {name} is {value}.", "What is the phone extension of the {name}?", "number"),
    ("The annual budget of the {name} is {value} dollars.", "What is the annual budget of the {name}?", "number"),
    ("The {name} was founded in the year {value}.", "In which year was the {name} founded?", "year"),
    ("The manager of the {name} is {value}.", "Who is the manager of the {name}?", "staff"),
    ("The {name} is located in {value}.", "In which city is the {name} located?", "city"),
    ("The mascot of the {name} is a {value}.", "What is the mascot of the {name}?", "animal"),
    ("A ticket for the {name} costs {value} dollars.", "How much does a ticket for the {name} cost?", "price"),
    ("The favorite dish at the {name} is {value}.", "What is the favorite dish at the {name}?", "dish"),
    ("The {name} has {value} employees.", "How many employees does the {name} have?", "number"),
)
"""Sentence, question and kind of value."""
LENGTHS = {"development": (2000,) * 5 + (4000,) * 2 + (7000,), "final": (2000,) * 13 + (4000,) * 6 + (7000,)}
"""Tokens of each document by set, about."""
BYTES_PER_TOKEN = 4.3
"""Of SmolLM2."""
DIGESTS = {
    "development": "b3a945dd3d3520459bb54f2ceef263c186b89de2c3ae560a25a406c3b062ac1a",
    "final": "80ff684c52cbc02e7f31b40f7466168c18bf0e7f77454718e15feb6e13b3521e",
}
"""SHA-256 of each set on Debian 12 with Python 3.11."""


def documents(name: str) -> list[Document]:
    """The documents of a set, `development` or `final`. Raises RuntimeError if this machine's prose is different."""
    rng = random.Random(f"planted facts: {name}")
    prose = paragraphs()
    found = [_document(rng, prose, int(tokens * BYTES_PER_TOKEN)) for tokens in LENGTHS[name]]
    if (is_so := digest(found)) != DIGESTS[name]:
        raise RuntimeError(f"the prose on this machine differs: the hash of the {name} set is {is_so}")
    return found


def digest(found: Sequence[Document]) -> str:
    """SHA-256 over texts and questions."""
    parts = [part for document in found for part in (document.text, *(q.text for q in document.questions))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def paragraphs() -> list[list[str]]:
    """The paragraphs of each text, in order."""
    licences = [path.read_text() for path in sorted(LICENCES.iterdir()) if not path.is_symlink()]
    texts = [*licences, *(text for _, text in sorted(topics.topics.items()))]
    found = [[block for block in re.split(r"\n\s*\n", text) if _is_prose(block)] for text in texts]
    return [blocks for blocks in found if blocks]


def _is_prose(block: str) -> bool:
    return len(block) >= LEAST_PARAGRAPH and block.rstrip().endswith(".") and ">>>" not in block and "::=" not in block


def _document(rng: random.Random, prose: Sequence[Sequence[str]], size: int) -> Document:
    """Consecutive paragraphs of one or more texts, with facts at the ends of some."""
    blocks, length = list[str](), 0
    while length < size:
        text = rng.choice(prose)
        first = rng.randrange(len(text))
        for block in text[first : first + rng.randint(4, 12)]:
            if length < size:
                blocks.append(block)
                length += len(block) + 2
    facts = list(_facts(rng))
    for number, (sentence, _, _) in enumerate(facts):
        low, high = (len(blocks) * part // PER_DOCUMENT for part in (number, number + 1))
        place = rng.randrange(low, max(low + 1, high))
        blocks[place] = f"{blocks[place].rstrip()} {sentence}"
    text = "\n\n".join(blocks) + "\n"
    questions = (Question("planted", ask, (value,), text.index(sentence) / len(text)) for sentence, ask, value in facts)
    return Document(text, tuple(questions))


def _facts(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Sentence, question and value of each fact of a document; no two are of a kind, or share a word
    of their names."""
    parts = (rng.sample(words, PER_DOCUMENT) for words in (ADJECTIVES, NOUNS, PLACES))
    for *words, (sentence, question, kind) in zip(*parts, rng.sample(KINDS, PER_DOCUMENT), strict=True):
        name, value = " ".join(words), _value(rng, kind)
        yield sentence.format(name=name, value=value), question.format(name=name), value


def _value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        return str(rng.randrange(1000, 10000))
    if kind == "year":
        return str(rng.randrange(1850, 2000))
    if kind == "price":
        return str(rng.randrange(11, 99))
    return rng.choice({"staff": STAFF, "city": CITIES, "dish": DISHES, "animal": ANIMALS}[kind])
