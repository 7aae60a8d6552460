"""Files of `longleaf ingest`: their collection, the report about it, the name of the context, and errors by file."""

import sys
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.text import Text

from longleaf.document_text import NamedPart
from longleaf.documents.collection import STANDARD_INPUT, Collection, Collector
from longleaf.documents.names import context_name
from longleaf.documents.text_files import check_encoding, find_invalid_utf8
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_count, human_list, printable

if TYPE_CHECKING:
    from longleaf.documents.extraction_process import FileSection

MOST_NAMES = 5
"""Files that the report names for each reason."""


def choose_name(name: str, files: Sequence[str], append: bool) -> str:
    """The name of the context: as given, or derived from the only file or folder. Raises InvalidArgument."""
    if name:
        return name
    if append:
        raise InvalidArgument("--name", "is required with --append")
    if len(files) > 1:
        raise InvalidArgument("--name", "is required with several files")
    if files[0] == "-":
        raise InvalidArgument("--name", "is required for standard input")
    return context_name(Path(files[0]).resolve().name)


def collect(files: Sequence[str], *, encoding: str, as_text: bool, is_shown: bool) -> Collection:
    """The text of the files, with a progress line on stderr if `is_shown`. Raises InvalidArgument."""
    charset = check_encoding(encoding, "--encoding") if encoding else ""
    console = Console(stderr=True, quiet=not is_shown)
    with console.status("") as status:
        if not console.is_terminal:
            status.stop()

        def show(section: "FileSection") -> None:
            place = f", {section.label}" if section.label else ""
            status.update(Text(f"extracting {printable(section.file)}{place}"))  # names may contain markup

        collector = Collector(encoding=charset, as_text=as_text, on_section=show)
        stream = cast(BufferedReader, sys.stdin.buffer) if "-" in files else None
        return collector.collect(files, stream)


def report_collection(collection: Collection, name: str) -> None:
    """Prints the files that were left out with the reasons, and for folders and archives the number of files with
    text, on stderr. Raises InvalidArgument if no file has text."""
    by_reason = defaultdict[str, list[str]](list)
    for each in collection.left_out:
        by_reason[each.reason].append(each.file)
    for remark in collection.remarks:
        print(f"{remark.file} {remark.reason}", file=sys.stderr)
    for reason, files in by_reason.items():
        text = f"{files[0]} {reason}" if len(files) == 1 else f"each {reason}: {human_list(files, MOST_NAMES)}"
        print(text, file=sys.stderr)
    if not collection.files:
        raise InvalidArgument(name, "has no file with text")
    if collection.is_from_many:
        left = f", {len(collection.left_out):,} left out" if collection.left_out else ""
        print(f"{human_count(len(collection.files), 'file')} with text{left}", file=sys.stderr)


def text_paths(collection: Collection) -> list[Path]:
    """The files that are sent as they are, whose content the service checks."""
    parts = [file.part for file in collection.files]
    return [part.content for part in parts if isinstance(part, NamedPart) and isinstance(part.content, Path)]


@contextmanager
def named_files(files: Sequence[str], sent: Sequence[Path]) -> Generator[None, None, None]:
    """Replaces the field in errors about the document by the names of the files; `sent` are those sent as they are."""
    try:
        yield
    except InvalidArgument as error:
        if error.field == "text" and (found := _invalid_file(sent)) is not None:
            raise found from None
        if error.field.partition(".")[0] in ("text", "token_ids"):
            names = ", ".join(STANDARD_INPUT if file == "-" else printable(file) for file in files)
            raise InvalidArgument(names, error.description) from None
        raise


def _invalid_file(paths: Sequence[Path]) -> InvalidArgument | None:
    """An error that names the first file that is not UTF-8. None if there is none, or if a file before it cannot be
    read again, such as a pipe."""
    try:
        for path in paths:
            if not path.is_file():
                return None
            if reason := find_invalid_utf8(path):
                return InvalidArgument(printable(str(path)), reason)
    except OSError:
        pass
    return None
