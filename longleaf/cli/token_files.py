"""Files of token ids."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from longleaf.errors import InvalidArgument
from longleaf.little_endian import IntegerType, unpack

TokenFormat = Literal["json", "uint16", "uint32"]
TYPE_CODES: dict[str, IntegerType] = {"uint16": "H", "uint32": "I"}
PIECE_BYTES = 1 << 18


class _Tokens(msgspec.Struct):
    """The output of `longleaf tokenize --json`."""

    token_ids: list[int]


def read_ids(files: Sequence[str], format: TokenFormat) -> Iterator[Sequence[int]]:
    """The ids in files, or in standard input for `-`: a JSON list, an object with the list `token_ids`, or
    little-endian numbers. Raises InvalidArgument that names the file if it is invalid or cannot be read."""
    for file in files:
        name = "standard input" if file == "-" else file
        try:
            with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as opened:
                yield from [_from_json(opened.read())] if format == "json" else _from_numbers(opened, format)
        except msgspec.DecodeError as error:
            raise InvalidArgument(name, f"is not a JSON list of token ids: {error}") from None
        except ValueError as error:
            raise InvalidArgument(name, str(error)) from None
        except OSError as error:
            raise InvalidArgument(name, f"cannot be read: {error.strerror}") from None


def _from_json(data: bytes) -> Sequence[int]:
    found = msgspec.json.decode(data, type=list[int] | _Tokens)
    return found.token_ids if isinstance(found, _Tokens) else found


def _from_numbers(file: BinaryIO, format: str) -> Iterator[Sequence[int]]:
    """Raises ValueError if the file ends inside a number."""
    type_code = TYPE_CODES[format]
    size, resident = array(type_code).itemsize, b""
    while data := file.read(PIECE_BYTES):
        data = resident + data
        whole = len(data) - len(data) % size
        resident = data[whole:]
        yield unpack(type_code, data[:whole])
    if resident:
        raise ValueError(f"ends inside a token id: each {format} has {size} bytes")
