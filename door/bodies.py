"""Bodies of requests: strict JSON of a bounded size."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from door.errors import Problem
from longleaf.config import MAX_REQUEST_BYTES

MAX_JSON_BYTES = MAX_REQUEST_BYTES + (1 << 19)
"""What the service takes at once, and some for what JSON says in more bytes."""
MAX_VALUES = 50_000
"""Texts, objects and arrays of a body. To make so many takes the interpreter a tenth of a second."""
MAX_COMMAS = 1 << 19
"""Between all values: a prompt may be a long list of numbers."""
BODY_SECONDS = 30.0
"""How long the next part of a body may take."""
LARGE_BYTES = 1 << 18
"""What is larger is decoded beside the event loop, one after the other: together they would keep everybody waiting."""
_decoding = ThreadPoolExecutor(1, "decoding")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Body = TypeVar("Body", bound=msgspec.Struct)
PATH = re.compile(r"^(?P<told>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)


async def read_json(request: Request) -> dict[str, Any]:
    """The object that the body is. Raises Problem."""
    content = await _read(request)
    if len(content) > LARGE_BYTES:
        decoded = await asyncio.get_running_loop().run_in_executor(_decoding, decode, content)
    else:
        decoded = decode(content)
    if not isinstance(decoded, dict):
        raise Problem(400, "the body is no JSON object")
    return cast(dict[str, Any], decoded)


async def _read(request: Request) -> bytes:
    content, stream = bytearray(), request.stream()
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_JSON_BYTES:
        raise too_large()
    try:
        while True:
            async with asyncio.timeout(BODY_SECONDS):
                part = await anext(stream, None)
            if part is None:
                return bytes(content)
            content += part
            if len(content) > MAX_JSON_BYTES:
                raise too_large()
    except TimeoutError:
        raise Problem(408, "the body did not come", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the body ended before its end") from None


def too_large() -> Problem:
    told = f"the body has more than {MAX_JSON_BYTES:,} bytes; a document goes to POST /v1/contexts/NAME"
    return Problem(413, told)  # what still comes is thrown away: a closed connection would not let this be read


def decode(content: bytes) -> object:
    """Raises Problem for what is no JSON, or says a thing twice, or has no meaning in UTF-8, or has too many values."""
    _check_size(content)
    try:
        found = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_no_number)
        if _SURROGATE.search(content):
            _check_texts(found)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Problem(400, f"the body is no JSON: {error}") from None
    return found


def _check_size(content: bytes) -> None:
    """Raises Problem for more values than a decoder makes in a short time."""
    if sum(map(content.count, (b",", b"[", b"{"))) <= MAX_VALUES:  # in texts or not
        return
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # what quotes are left begin and end texts
    num_values, num_commas = bare.count(b'"') // 2, 0
    if num_values <= MAX_VALUES:
        outside = b"".join(bare.split(b'"')[::2])
        num_values += outside.count(b"[") + outside.count(b"{")
        num_commas = outside.count(b",")
    if num_values > MAX_VALUES or num_commas > MAX_COMMAS:
        told = f"the body has more than {MAX_VALUES:,} texts, objects and arrays, or {MAX_COMMAS:,} numbers"
        raise Problem(413, told)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice in one object")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_texts(found: object) -> None:
    """Raises ValueError for half of a character."""
    match found:
        case str():
            try:
                found.encode()
            except UnicodeEncodeError:
                raise ValueError("a text has half of a surrogate pair") from None
        case dict():
            for name, value in cast(dict[str, object], found).items():
                _check_texts(name)
                _check_texts(value)
        case list():
            for value in cast(list[object], found):
                _check_texts(value)
        case _:
            pass


def converted(raw: object, kind: type[Body], parent: str = "") -> Body:
    """`raw` as the struct. Raises Problem that names the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        match = PATH.match(str(error))
        path, told = (match["path"] or "", match["told"]) if match is not None else ("", str(error))
        param = ".".join(filter(None, (parent, path))) or None
        raise Problem(400, f"{param or 'the body'}: {told}", param=param, code="invalid_type") from None
    except (OverflowError, RecursionError) as error:
        raise Problem(400, f"the body: {error}") from None
