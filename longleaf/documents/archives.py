"""Members of zip and tar archives. They are read in memory: nothing is written, so links and paths reach no file."""

import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from lzma import LZMAError
from pathlib import PurePosixPath

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.limits import ExtractionLimits

ENCRYPTED = 1
DAMAGED = (zipfile.BadZipFile, zipfile.LargeZipFile, tarfile.TarError, zlib.error, LZMAError, EOFError, OSError)
UNIX = 3
"""`create_system` of members with Unix modes."""
MAX_NAME = 512


@dataclass(frozen=True)
class ArchiveMember:
    """A file of an archive, or the reason why it is not read."""

    name: str
    data: bytes = b""
    refused: str = ""


class ArchiveBudget:
    """Counts the members of a file and their decompressed bytes, over all levels."""

    def __init__(self, limits: ExtractionLimits) -> None:
        self.limits = limits
        self._num_members = self._num_bytes = 0

    def add_member(self) -> None:
        """Raises LimitExceeded."""
        self._num_members += 1
        if self._num_members > self.limits.num_members:
            raise LimitExceeded(f"has more than {self.limits.num_members:,} members")

    def add_bytes(self, num_bytes: int) -> None:
        """Raises LimitExceeded."""
        self._num_bytes += num_bytes
        if self._num_bytes > self.limits.expanded_bytes:
            raise LimitExceeded(f"has more than {self.limits.expanded_bytes:,} decompressed bytes")


def zip_members(data: bytes, budget: ArchiveBudget) -> Iterator[ArchiveMember]:
    """The files of a zip archive. Raises LimitExceeded, and Unreadable for a damaged archive."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            for info in archive.infolist():
                budget.add_member()
                if not info.is_dir():
                    yield _zip_member(archive, info, budget)
    except (*DAMAGED, NotImplementedError, ValueError) as error:
        raise Unreadable(f"is a damaged zip archive: {_reason(error)}") from None


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: ArchiveBudget) -> ArchiveMember:
    mode = info.external_attr >> 16 if info.create_system == UNIX else 0
    refused = refused_name(info.filename)
    if info.flag_bits & ENCRYPTED:
        refused = "is encrypted"
    elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        refused = "is a link" if stat.S_ISLNK(mode) else "is not a regular file"
    elif info.file_size > budget.limits.member_bytes:
        refused = f"has {info.file_size:,} bytes; the limit is {budget.limits.member_bytes:,}"
    if refused:
        return ArchiveMember(info.filename, refused=refused)
    budget.add_bytes(info.file_size)  # the declared size limits the read, not the compressed data
    try:
        with archive.open(info) as file:
            return ArchiveMember(info.filename, file.read(info.file_size + 1))
    except (*DAMAGED, NotImplementedError, RuntimeError) as error:
        return ArchiveMember(info.filename, refused=f"is damaged: {_reason(error)}")


def tar_members(data: bytes, budget: ArchiveBudget) -> Iterator[ArchiveMember]:
    """The files of a tar archive, compressed or not. Raises LimitExceeded, and Unreadable for a damaged archive."""
    try:
        with tarfile.open(fileobj=BytesIO(data), mode="r|*") as archive:
            for info in archive:
                budget.add_member()
                budget.add_bytes(info.size if info.isfile() else 0)
                if not info.isdir():
                    yield _tar_member(archive, info, budget.limits)
    except (*DAMAGED, ValueError, RecursionError) as error:  # the last for extended headers in a row
        raise Unreadable(f"is not a tar archive, or a damaged one: {_reason(error)}") from None


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo, limits: ExtractionLimits) -> ArchiveMember:
    refused = refused_name(info.name)
    if info.issym() or info.islnk():
        refused = "is a link"
    elif not info.isfile():
        refused = "is not a regular file"
    elif info.size > limits.member_bytes:
        refused = f"has {info.size:,} bytes; the limit is {limits.member_bytes:,}"
    file = None if refused else archive.extractfile(info)
    return ArchiveMember(info.name, refused=refused) if file is None else ArchiveMember(info.name, file.read())


def refused_name(name: str) -> str:
    """The reason for which a member with this name is left out; empty if there is none."""
    if len(name) > MAX_NAME:
        return f"has a name of more than {MAX_NAME} characters"
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or path.drive or name[1:2] == ":":
        return "has a name that leads out of the archive"
    if any(part.startswith(".") and part != "." for part in path.parts) or "__MACOSX" in path.parts:
        return "is hidden"
    return ""


def _reason(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
