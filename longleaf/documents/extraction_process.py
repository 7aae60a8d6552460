"""Extraction in a separate process: start, limits of time and output, result."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import BinaryIO

import msgspec

from longleaf.documents.errors import LimitExceeded
from longleaf.documents.limits import LIMITS, ExtractionLimits
from longleaf.documents.messages import (
    LENGTH_BYTES,
    MAX_MESSAGE,
    Confined,
    ExtractionEnded,
    ExtractionRequest,
    Mechanism,
    MemberSkipped,
    MemberStarted,
    Message,
    Remark,
    TextFound,
    decode,
)
from longleaf.documents.text_budget import TextBudget
from longleaf.errors import Cancelled, InvalidArgument
from longleaf.formatting import human_number, printable

READ_BYTES = 1 << 20
STARTER = (
    "import sys; sys.path[:] = sys.argv[2].split(chr(10)); from longleaf.documents.child import main; main(sys.argv[1])"
)
"""The program. It gets its module path as an argument, because it has no environment."""
WITHIN = 5.0
"""Additional time for the start of the process, in seconds."""


class FileSection(msgspec.Struct, frozen=True):
    """Text of one place in a file."""

    file: str
    """Name of the file; a member of an archive has the path ARCHIVE/MEMBER."""
    label: str
    """The place in the file, such as "page 7"; empty if the file has no places."""
    text: str


class LeftOut(msgspec.Struct, frozen=True):
    """A file without text in the result."""

    file: str
    reason: str
    """A predicate of the file, such as "is a PNG image"."""


class ExtractedFile(msgspec.Struct, frozen=True):
    """The result for one file or archive."""

    sections: tuple[FileSection, ...]
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[LeftOut, ...] = ()
    """Remarks about files with text, such as pages without text."""
    confined_by: tuple[Mechanism, ...] = ()


class ExtractionProcess:
    """One confined process for one file."""

    def __init__(self, file: BinaryIO, request: ExtractionRequest) -> None:
        """Starts the process. `file` must be a real file at its beginning; the process reads it by its descriptor."""
        self._limits = request.limits
        self._ends = time.monotonic() + request.limits.seconds + WITHIN
        self._is_cancelled = threading.Event()
        paths = "\n".join(os.path.abspath(path) for path in sys.path if os.path.exists(path or "."))
        options = ("-I", "-S", "-B", "-X", "utf8")
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", STARTER, msgspec.json.encode(request).decode(), paths],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal reaches only the parent
        )

    def cancel(self) -> None:
        """Ends the extraction, from any thread: `messages` raises Cancelled."""
        self._is_cancelled.set()
        self._process.kill()

    def messages(self) -> Generator[Message]:
        """The messages of the process, up to ExtractionEnded, added with the reason if the process ends without
        it. Raises Cancelled."""
        try:
            buffer = bytearray()
            while True:
                piece = self._read()
                if piece is None:
                    yield ExtractionEnded(self._took_too_long())
                    return
                buffer += piece
                while (content := _take(buffer)) is not None:
                    message = decode(content)
                    yield message
                    if isinstance(message, ExtractionEnded):
                        return
                if not piece:
                    yield ExtractionEnded(self._describe_end())
                    return
        except (msgspec.DecodeError, ValueError, RecursionError):  # the last for unknown fields that are nested deeply
            yield ExtractionEnded("cannot be read: its reader failed")
        finally:
            self.close()
            if self._is_cancelled.is_set():
                raise Cancelled("the extraction was cancelled")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> bytes | None:
        """Further output, empty at its end; None when the time is over."""
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(number, select.POLLIN)
        left = self._ends - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        return os.read(number, READ_BYTES)

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(max(0.0, self._ends - time.monotonic()))
        except subprocess.TimeoutExpired:  # it has closed its output, and runs
            return self._took_too_long()
        if code == -signal.SIGXCPU:
            return f"needs more than {self._limits.cpu_seconds:,} s of processor time"
        if code == -signal.SIGKILL:  # as the kernel does where memory runs out
            return "cannot be read: its reader was killed, as happens when this machine has too little memory"
        return "cannot be read: it is damaged, or needs too much memory"

    def _took_too_long(self) -> str:
        return f"took more than {human_number(self._limits.seconds)} s"


def _take(buffer: bytearray) -> bytes | None:
    """Removes one message from the buffer; None if it is incomplete. Raises ValueError for too long a message."""
    if len(buffer) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + (length := int.from_bytes(buffer[:LENGTH_BYTES], "big"))
    if length > MAX_MESSAGE:
        raise ValueError("message too long")
    if len(buffer) < end:
        return None
    content = bytes(buffer[LENGTH_BYTES:end])
    del buffer[:end]
    return content


def extract(
    file: BinaryIO,
    name: str,
    *,
    limits: ExtractionLimits = LIMITS,
    encoding: str = "",
    as_text: bool = False,
    declared: str = "",
    budget: TextBudget | None = None,
    on_start: Callable[[ExtractionProcess], None] | None = None,
    on_section: Callable[[FileSection], None] | None = None,
) -> ExtractedFile:
    """The text of a file, with the places in it; see `ExtractionRequest` for the parameters. Several files may share a
    budget. `on_start` receives the process, which another thread may cancel. Raises InvalidArgument naming the file,
    and Cancelled."""
    shown = printable(name)
    request = ExtractionRequest(name=name, limits=limits, encoding=encoding, as_text=as_text, declared=declared)
    if (size := os.fstat(file.fileno()).st_size) > limits.file_bytes:
        raise InvalidArgument(shown, f"has {size:,} bytes; the limit is {limits.file_bytes:,}")
    process = ExtractionProcess(file, request)
    if on_start is not None:
        on_start(process)
    result = _Result(shown, budget or TextBudget(limits), limits)
    reason = "cannot be read: its reader failed"
    with closing(process.messages()) as messages:
        try:
            for message in messages:
                if isinstance(message, ExtractionEnded):
                    reason = message.reason
                elif (section := result.add(message)) is not None and on_section is not None:
                    on_section(section)
        except LimitExceeded as error:
            raise InvalidArgument(shown, str(error)) from None
    if reason:
        result.discard()
        where = f"{result.path}: " if result.path else ""
        raise InvalidArgument(shown, f"{where}{printable(reason)}")
    return result.extracted()


class _Result:
    """Collects the messages. The process is not trusted: names are made printable, and amounts are limited."""

    def __init__(self, name: str, budget: TextBudget, limits: ExtractionLimits = LIMITS) -> None:
        self._name, self._budget, self._limits = name, budget, limits
        self._sections = list[FileSection]()
        self._left_out = list[LeftOut]()
        self._remarks = list[LeftOut]()
        self._by: tuple[Mechanism, ...] = ()
        self._num_added = self._num_bytes = self._num_messages = 0
        self._file, self._file_bytes = name, len(name.encode())
        self.path = ""
        """The member that is being read."""

    def add(self, message: Message) -> FileSection | None:
        """Returns the section of a text. Raises LimitExceeded for more than the limits allow."""
        match message:
            case Confined(by):
                self._count_message()
                self._by = by
            case MemberStarted(path):
                self._count_message()
                self.path = printable(path)
                self._file = self._file_of(self.path)  # all sections of a member share this string
                self._file_bytes = len(self._file.encode())
            case TextFound(label, text):
                # the name counts for each section, because the names of places contain it
                self._count(self._file_bytes + len(label) + len(text.encode(errors="replace")))
                section = FileSection(self._file, printable(label), text)
                self._sections.append(section)
                return section
            case MemberSkipped(path, reason):
                self._left_out.append(self._counted(path, reason))
            case Remark(path, remark):
                self._remarks.append(self._counted(path, remark))
            case ExtractionEnded():
                pass
        return None

    def discard(self) -> None:
        """Frees the share of the budget."""
        self._budget.remove(self._num_added, self._num_bytes)

    def extracted(self) -> ExtractedFile:
        return ExtractedFile(tuple(self._sections), tuple(self._left_out), tuple(self._remarks), self._by)

    def _counted(self, path: str, predicate: str) -> LeftOut:
        found = LeftOut(self._file_of(printable(path)), printable(predicate))
        self._count(len(found.file.encode()) + len(found.reason.encode()))
        return found

    def _count_message(self) -> None:
        """Counts a message without text: an honest process sends fewer of them than the limit of sections."""
        self._num_messages += 1
        if self._num_messages > self._limits.num_sections + 1:
            raise LimitExceeded(f"has more than {self._limits.num_sections:,} sections")

    def _count(self, num_bytes: int) -> None:
        self._num_added += 1
        self._num_bytes += num_bytes
        self._budget.add(num_bytes)

    def _file_of(self, path: str) -> str:
        return f"{self._name}/{path}" if path else self._name
