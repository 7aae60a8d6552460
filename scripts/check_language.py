"""Counts phrases and names that CONTRIBUTING asks to avoid, and fails when there are more than the ceiling allows.

    python scripts/check_language.py              # compare with the ceiling
    python scripts/check_language.py --files 20   # also list the files with the most findings
    python scripts/check_language.py --show tell  # print each finding of one pattern, word or kind
    python scripts/check_language.py --write      # lower the ceiling to the current counts; it never rises

Counts are by kind (names, docstrings, comments, messages, pages) and pattern. Names are those that the code defines:
modules, classes, functions, parameters, variables and attributes. Messages are string literals that contain a space.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CEILING = Path(__file__).with_name("language_ceiling.json")
LEFT_OUT = (
    "longleaf/v1/",
    "tests/fixtures/",
    "docs/adr/",
    "bench/results/",
    "scripts/check_language.py",
    "tests/unit/library/test_check_language.py",
)
"""Generated files, fixtures, decisions that stay as they were written, figures, and the patterns and their test."""
PHRASES = {
    "clause_as_noun": (
        r"\bwhat(?:ever)?\b(?![^.\n]*\?)|(?:^|[.:;(]\s+|\b(?:of|to|for|by|from|with|than|and|or|as|on)\s+)who\b"
    ),
    "tell": r"\b(?:tell|tells|told|telling|say|says|said|saying)\b",
    "nobody": r"\b(?:nobody|somebody|anybody|everybody|whoever|strangers?)\b",
    "fronted_genitive": (
        r"(?:^|[,;:.(]\s+|\band\s+)of (?:all|both|each|every|its|one|some|the|their|them|these|those)\b"
    ),
    "causative": (
        r"\b(?:has|have|had|having) (?:it|them|all|each|another|others|an?|the|its|their) "
        r"(?:\w+ ){0,3}?(?:be )?\w+(?:ed|en)\b"
    ),
    "pronoun_chain": r"(?:\b(?:it|they|them|these|those|such)\b[^.!?]*?){4,}",
    "personification": (
        r"\b(?:go(?:es)?|went|going|gone) on\b|\b(?:give|gives|gave|given|giving) (?:way|up)\b"
        r"|\b(?:come|comes|came|coming) back\b"
        r"|\b(?:rests|resting|wakes?|woken|visits?|meets|struck out|strikes out|held up|holds up)\b"
        r"|\b(?:let|lets) go\b|\b(?:take|takes|taken|took) up\b|\bmakes? way\b|\banew\b"
    ),
    "word_order": r"(?:^|[.!?]\s+)Also\b|,\s+too\b|\b(?:also|only) (?:when|where|while|if)\b|\bnot \w+ either\b",
    "understatement": r"\b(?:a while|as it comes|for good|at all|alone|once more|by itself|of its own)\b",
}
"""Regular expressions of prose, by pattern."""
WORDS = frozenset(
    """
    anew anteroom asked betray bearing blame carriage crowd desk dies door earlier fitting forgetful go grounds guesses
    healing held house housed intake keeper keeping kept lasting laws leaving arriving life lives lobby mailbox masses
    meeting moment moving neighbours news nobody nobodys noted nowhere parcel parcels parked parking reread rereading
    resting retell retelling retold roster said saw says settle settled speller spelled spelling standing strangers
    stranger tell tellers teller telling tells told trouble unheard wake welcome whoever whose witness
    """.split()
)
"""Parts of names that are not terms of the field."""
PATTERNS = {pattern: re.compile(text, re.MULTILINE | re.IGNORECASE) for pattern, text in PHRASES.items()}
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
SCRIPT_TEXT = re.compile(
    r"//[^\n]*|/\*.*?\*/|<!--.*?-->|`[^`]* [^`]*`|\"[^\"\n]* [^\"\n]*\"|'[^'\n]* [^'\n]*'", re.DOTALL
)
TAG = re.compile(r"<(?:script|style).*?</(?:script|style)>|<[^>]*>", re.DOTALL)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Text(NamedTuple):
    """A piece of prose, or a name."""

    kind: str
    line: int
    content: str


class Finding(NamedTuple):
    """A pattern at one place."""

    file: str
    line: int
    kind: str
    pattern: str
    content: str


def files() -> list[Path]:
    """Tracked files that are written by hand."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and not name.startswith(LEFT_OUT)]
    return [ROOT / name for name in names if Path(name).suffix in READERS]


def python_texts(source: str) -> Iterator[Text]:
    """Names, docstrings, messages and comments of a module."""
    tree = ast.parse(source)
    docstrings = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)) as constant):
                docstrings.add(id(constant))
                yield Text("docstrings", node.lineno, text)
            case _:
                pass
    for node in ast.walk(tree):
        yield from ((Text("names", line, name)) for name, line in defined(node))
        match node:
            case ast.Constant(value=str(text)) if " " in text and id(node) not in docstrings:
                yield Text("messages", node.lineno, text)
            case _:
                pass
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("comments", token.start[0], token.string.lstrip("# "))


def defined(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a node defines, and their lines."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name, node.lineno
        case ast.arg():
            yield node.arg, node.lineno
        case ast.Name(ctx=ast.Store()):
            yield node.id, node.lineno
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr, node.lineno
        case _:
            pass


def page_texts(source: str) -> Iterator[Text]:
    """A page of Markdown without its examples."""
    yield Text("pages", 1, CODE_BLOCK.sub(lambda found: "\n" * found[0].count("\n"), source))


def script_texts(source: str) -> Iterator[Text]:
    """Comments and texts of JavaScript, CSS or protobuf."""
    for found in SCRIPT_TEXT.finditer(source):
        yield Text("pages", source.count("\n", 0, found.start()) + 1, found[0].replace("//", "  "))


def markup_texts(source: str) -> Iterator[Text]:
    """Visible text of HTML."""
    yield Text("pages", 1, TAG.sub(lambda found: "\n" * found[0].count("\n"), source))


def hash_texts(source: str) -> Iterator[Text]:
    """Comments of YAML, TOML and shell scripts."""
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("#"):
            yield Text("comments", number, line.lstrip("# "))


READERS = {
    ".py": python_texts,
    ".md": page_texts,
    ".proto": script_texts,
    ".js": script_texts,
    ".css": script_texts,
    ".c": script_texts,
    ".h": script_texts,
    ".html": markup_texts,
    ".yaml": hash_texts,
    ".yml": hash_texts,
    ".toml": hash_texts,
    ".sh": hash_texts,
}


def findings(path: Path) -> Iterator[Finding]:
    """All findings of a file, including those in its name."""
    name = str(path.relative_to(ROOT))
    texts = [Text("names", 0, path.stem), *READERS[path.suffix](path.read_text())]
    for text in texts:
        if text.kind == "names":
            parts = [part.lower() for part in PART.findall(text.content)]
            yield from (Finding(name, text.line, "names", part, text.content) for part in parts if part in WORDS)
            continue
        for pattern, compiled in PATTERNS.items():
            for found in compiled.finditer(text.content):
                line = text.line + text.content.count("\n", 0, found.start())
                begin = max(0, found.start() - 30)
                shown = " ".join(text.content[begin : found.end() + 30].split())
                yield Finding(name, line, text.kind, pattern, shown)


def count(found: list[Finding]) -> dict[str, int]:
    """By kind and pattern; names are one pattern."""
    keys = (f"{each.kind}.{'words' if each.kind == 'names' else each.pattern}" for each in found)
    return dict(sorted(Counter(keys).items()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=0, metavar="N", help="list the N files with the most findings")
    parser.add_argument(
        "--show", metavar="PATTERN", help="print each finding of a pattern, of a word in names, or of a kind"
    )
    parser.add_argument("--write", action="store_true", help="lower the ceiling to the current counts")
    options = parser.parse_args(arguments)
    found = [each for path in files() for each in findings(path)]
    counts = count(found)
    ceiling = json.loads(CEILING.read_text()) if CEILING.exists() else counts
    over = {key: n for key, n in counts.items() if n > ceiling.get(key, 0)}
    for each in found:
        if options.show in (each.pattern, each.kind):
            print(f"{each.file}:{each.line}: {each.kind}: {each.content}")
    for file, n in Counter(each.file for each in found).most_common(options.files):
        print(f"{n:6,} {file}")
    for key, n in over.items():
        print(f"{key}: {n:,} findings, the ceiling is {ceiling.get(key, 0):,} (--show lists them)", file=sys.stderr)
    if options.write and not over:
        CEILING.write_text(json.dumps(counts, indent=2) + "\n")
    print(f"{sum(counts.values()):,} findings, ceiling {sum(ceiling.values()):,}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
