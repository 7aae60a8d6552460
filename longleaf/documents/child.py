"""The extraction process: reads a file from standard input, and writes messages to standard output.

`longleaf.documents.extraction_process` starts it, with an empty environment.
"""

import codecs
import encodings.aliases
import os
from contextlib import suppress
from importlib import import_module

import msgspec

from longleaf.documents.confinement import confine
from longleaf.documents.extraction import Extraction, import_readers
from longleaf.documents.limits import LIMITS
from longleaf.documents.messages import LENGTH_BYTES, Confined, ExtractionEnded, ExtractionRequest, Message, encode

PIECE_BYTES = 1 << 20


def main(argument: str) -> None:
    """Extracts the file that `argument`, an ExtractionRequest as JSON, describes."""
    request = msgspec.json.decode(argument, type=ExtractionRequest)
    import_readers()
    import_codecs()
    data = _read(request.limits.file_bytes)
    send(Confined(confine(request.limits, len(data))))
    try:
        for message in Extraction(request).messages(data):
            send(message)
    except MemoryError:
        del data
        send(ExtractionEnded(f"needs more than {request.limits.memory_bytes:,} bytes of memory"))


def _read(max_bytes: int) -> bytes:
    """The file, or its first `max_bytes` + 1 bytes."""
    pieces, left = list[bytes](), max_bytes + 1
    while left > 0 and (piece := os.read(0, min(left, PIECE_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def send(message: Message) -> None:
    """Writes a message to standard output."""
    content = encode(message)
    data = memoryview(len(content).to_bytes(LENGTH_BYTES, "big") + content)
    while data:
        data = data[os.write(1, data) :]


def import_codecs() -> None:
    """Imports the charsets, because a confined process cannot open modules."""
    for name in {*encodings.aliases.aliases.values(), "idna"}:
        with suppress(ImportError):
            import_module(f"encodings.{name}")
    codecs.lookup("utf-8")


def report() -> None:
    """Confines this process, and prints the restrictions that this machine enforces."""
    print(", ".join(confine(LIMITS, 0)))


if __name__ == "__main__":
    report()
