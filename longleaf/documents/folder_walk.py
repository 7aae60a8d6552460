"""Files of a folder, without hidden ones, links, and those that its .gitignore files exclude."""

import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from longleaf.errors import InvalidArgument
from longleaf.formatting import human_count, human_list, printable

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_FILES = 10_000
MAX_ENTRIES = 1_000_000
"""Entries of all folders, ignored ones included."""
MAX_DEPTH = 64
IGNORE_FILE = ".gitignore"
MAX_IGNORE_BYTES = 1 << 20
MAX_WILDCARDS = 4
"""Runs of stars in a pattern: the time for a name grows with its length to this power."""
MAX_WILDCARDS_OF_NAME = 3
"""Runs of stars between two slashes."""
MAX_PATTERNS = 2_000
"""Patterns of all .gitignore files that apply to a folder: each name is compared with all of them."""
MAX_PATTERN = 1_000
"""Characters of a pattern."""
MAX_LINES = 5
"""Lines with invalid patterns that a remark names."""
_STARS = re.compile(r"\*+")


class FoundFile(NamedTuple):
    """A file of a folder, or one that is left out."""

    path: Path
    name: str
    """The name of the folder, then the path in it, with slashes."""
    refused: str = ""
    """Why it is left out, as a predicate; empty if it is not."""


class FolderWalk:
    """Walks one folder, in the order of names."""

    def __init__(self, folder: Path, max_files: int = MAX_FILES) -> None:
        self._folder, self._max_files = folder, max_files
        self._title = folder.resolve().name or "root"
        self._num_files = self._num_entries = 0

    def files(self) -> Iterator[FoundFile]:
        """Raises InvalidArgument for too many files, and if the folder cannot be read."""
        yield from self._walk(self._folder, "", [])

    def _walk(self, folder: Path, inside: str, rules: "list[tuple[str, GitIgnoreSpec]]") -> Iterator[FoundFile]:
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            if not inside:
                raise InvalidArgument(printable(str(folder)), reason) from None
            yield FoundFile(folder, self._name(inside), reason)
            return
        own, remarks = _rules_in(folder, inside, MAX_PATTERNS - sum(len(spec.patterns) for _, spec in rules))
        for remark in remarks:
            yield FoundFile(folder / IGNORE_FILE, self._name(inside + IGNORE_FILE), remark)
        rules = [*rules, *own]
        for entry in found:
            self._num_entries += 1
            if self._num_entries > MAX_ENTRIES:
                raise InvalidArgument(printable(str(self._folder)), f"has more than {MAX_ENTRIES:,} entries")
            yield from self._entry(entry, inside, rules)

    def _entry(
        self, entry: "os.DirEntry[str]", inside: str, rules: "list[tuple[str, GitIgnoreSpec]]"
    ) -> Iterator[FoundFile]:
        path, relative = Path(entry.path), f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        refused = _refused(entry, relative + "/" * is_folder, rules)
        if refused:
            yield FoundFile(path, self._name(relative + "/" * is_folder), refused)
        elif not is_folder:
            self._num_files += 1
            if self._num_files > self._max_files:
                message = f"has more than {self._max_files:,} files: give a smaller folder, or exclude some in "
                message += IGNORE_FILE
                raise InvalidArgument(printable(str(self._folder)), message)
            yield FoundFile(path, self._name(relative))
        elif relative.count("/") >= MAX_DEPTH:
            yield FoundFile(path, self._name(f"{relative}/"), f"is more than {MAX_DEPTH} levels deep")
        else:
            yield from self._walk(path, f"{relative}/", rules)

    def _name(self, relative: str) -> str:
        return printable(f"{self._title}/{relative}")


def _has_many_stars(pattern: str) -> bool:
    names = [len(_STARS.findall(name)) for name in pattern.split("/")]
    return sum(names) > MAX_WILDCARDS or max(names) > MAX_WILDCARDS_OF_NAME


def _rules_in(folder: Path, inside: str, max_patterns: int) -> "tuple[list[tuple[str, GitIgnoreSpec]], list[str]]":
    """The rules of the folder, with the path to which they are relative, and remarks about patterns left out."""
    from pathspec import GitIgnoreSpec

    file = folder / IGNORE_FILE
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return [], []
        with file.open("rb") as content:
            lines = content.read(MAX_IGNORE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return [], []
    given = {i: line for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")}
    short = {i: line for i, line in given.items() if len(line) <= MAX_PATTERN}
    used = {i: line for i, line in short.items() if not _has_many_stars(line)}
    remarks = list[str]()
    if num_refused := len(short) - len(used):
        remark = f"has {human_count(num_refused, 'pattern')} with too many stars, not applied: the limit is "
        remarks.append(f"{remark}{MAX_WILDCARDS_OF_NAME} between slashes, and {MAX_WILDCARDS} in all")
    if num_long := len(given) - len(short):
        remarks.append(f"has {human_count(num_long, 'pattern')} with more than {MAX_PATTERN:,} characters, not applied")
    if len(used) > max_patterns:
        remark = f"has {human_count(len(used) - max_patterns, 'pattern')} too many, not applied: the limit is "
        remarks.append(f"{remark}{MAX_PATTERNS:,}, which includes those of the folders above")
        used = dict(islice(used.items(), max_patterns))
    valid = {i: line for i, line in used.items() if _is_valid(line)}
    if invalid := sorted(used.keys() - valid.keys()):
        places = human_list([f"line {i:,}" for i in invalid], MAX_LINES)
        remarks.append(f"has {human_count(len(invalid), 'invalid pattern')}, not applied: {places}")
    return [(inside, GitIgnoreSpec.from_lines(valid.values()))], remarks


def _is_valid(pattern: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([pattern])
    except (ValueError, re.error):  # the second one for ranges such as [z-a]
        return False
    return True


def _refused(entry: "os.DirEntry[str]", relative: str, rules: "list[tuple[str, GitIgnoreSpec]]") -> str:
    if entry.is_symlink():
        return "is a link"
    if entry.name.startswith("."):
        return "is hidden"
    if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
        return "is not a regular file"
    for inside, spec in reversed(rules):  # the rules of the innermost folder take precedence
        include = spec.check_file(relative.removeprefix(inside)).include
        if include is not None:
            return f"is excluded by {IGNORE_FILE}" if include else ""
    return ""
