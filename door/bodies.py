"""Bodies: of requests strict JSON of a bounded size, of bounded sizes together; of answers JSON."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from door.errors import HttpProblem, unavailable
from longleaf.config import MAX_REQUEST_BYTES

MAX_JSON_BYTES = MAX_REQUEST_BYTES + (1 << 19)
"""What the service takes at once, and some for what JSON says in more bytes."""
MAX_VALUES = 50_000
"""Texts, objects and arrays of a body. To make so many takes the interpreter a tenth of a second."""
MAX_COMMAS = 1 << 19
"""Between all values: a prompt may be a long list of numbers."""
MAX_HELD_BYTES = 64 << 20
"""Of all bodies that come or are decoded, and of prompts until the service answers; further ones get 503."""
COPIES = 2
"""How often a prompt is held while it goes to the service: as a message, and encoded."""
PART_SECONDS = 30.0
"""How long the next part of a body may take."""
BODY_SECONDS = 60.0
"""How long all of its parts may."""
LARGE_BYTES = 1 << 18
"""What is larger is decoded beside the event loop, one after the other: together they would keep everybody waiting."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Body = TypeVar("Body", bound=msgspec.Struct)
T = TypeVar("T")
PATH = re.compile(r"^(?P<told>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)


class BodyReader:
    """Takes in what callers send; bounds what it holds of all of them, and how long it waits for each."""

    def __init__(
        self, max_bytes: int = MAX_HELD_BYTES, *, part_seconds: float = PART_SECONDS, seconds: float = BODY_SECONDS
    ) -> None:
        self._held = MemoryBudget(max_bytes)
        self._part_seconds, self._seconds = part_seconds, seconds
        self._decoding = asyncio.Lock()

    def audit(self) -> None:
        """While nobody sends anything, nothing is held."""
        assert self._held.num_bytes == 0, f"{self._held.num_bytes} bytes are still counted"

    def share(self) -> "MemoryLease":
        """A share of the memory that all bodies have, of no bytes yet."""
        return MemoryLease(self._held)

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The object that the body is. Raises HttpProblem."""
        with self.share() as share:
            return (await self._decoded(request, share, _itself))[0]

    async def read(self, request: Request, share: "MemoryLease", convert: Callable[[dict[str, Any]], T]) -> T:
        """What `convert` makes of the object that the body is; `share` has the memory of that from here on. Raises
        HttpProblem."""
        converted, num_bytes = await self._decoded(request, share, convert)
        share.keep(num_bytes)
        return converted

    async def _decoded(
        self, request: Request, share: "MemoryLease", convert: Callable[[dict[str, Any]], T]
    ) -> tuple[T, int]:
        content = await self._read(request, share)
        if len(content) <= LARGE_BYTES:
            return _decode_as(convert, content)
        async with self._decoding:  # what Python makes of it takes ten times as much: one at a time
            return await asyncio.to_thread(_decode_as, convert, content)

    async def _read(self, request: Request, share: "MemoryLease") -> bytearray:
        content, stream = bytearray(), request.stream()
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            share.grow(int(declared))
        try:
            async with asyncio.timeout(self._seconds):
                while (part := await self._next(stream)) is not None:
                    share.grow(len(content) + len(part))
                    content += part
        except TimeoutError:
            raise HttpProblem(408, "the body did not come", headers={"connection": "close"}) from None
        except ClientDisconnect:
            raise HttpProblem(400, "the body ended before its end") from None
        return content

    async def _next(self, stream: AsyncGenerator[bytes, None]) -> bytes | None:
        async with asyncio.timeout(self._part_seconds):
            return await anext(stream, None)


class MemoryBudget:
    """What all bodies together have, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0


class MemoryLease:
    """What one body has of it, to be entered."""

    def __init__(self, held: MemoryBudget) -> None:
        self._held, self._num_bytes = held, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """The memory is free. Idempotent."""
        self._held.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Has it be so many at least. Raises HttpProblem for more than one body may have, or than there is room for."""
        if num_bytes > MAX_JSON_BYTES:
            raise too_large()
        self.keep(num_bytes)

    def keep(self, num_bytes: int) -> None:
        """The same for a body that has been decoded."""
        more = max(0, num_bytes - self._num_bytes)
        if self._held.num_bytes + more > self._held.max_bytes:
            message = "the door takes in as much as it can, come again"
            raise unavailable(message)
        self._num_bytes += more
        self._held.num_bytes += more


async def json_of(request: Request) -> dict[str, Any]:
    """The object that the body of a request is. Raises HttpProblem."""
    bodies: BodyReader = request.app.state.bodies
    return await bodies.read_json(request)


def share_of(request: Request) -> MemoryLease:
    """A share of what the door of a request holds, to be entered."""
    bodies: BodyReader = request.app.state.bodies
    return bodies.share()


async def body_of(request: Request, share: MemoryLease, convert: Callable[[dict[str, Any]], T]) -> T:
    """What `convert` makes of the object that the body of a request is. Raises HttpProblem."""
    bodies: BodyReader = request.app.state.bodies
    return await bodies.read(request, share, convert)


def _itself(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _decode_as(convert: Callable[[dict[str, Any]], T], content: bytearray) -> tuple[T, int]:
    """What `convert` makes of a JSON object, and the bytes that it and its copies take. Raises HttpProblem."""
    decoded = decode(content)
    if not isinstance(decoded, dict):
        raise HttpProblem(400, "the body is no JSON object")
    found = cast(dict[str, Any], decoded)
    num_bytes = max(COPIES * len(content), _text_bytes(found))
    return convert(found), num_bytes


def _text_bytes(found: object) -> int:
    """The bytes of all texts: one character beyond the 16-bit ones has each of its text take four."""
    match found:
        case str():
            return sys.getsizeof(found)
        case dict():
            return sum(map(_text_bytes, cast(dict[str, object], found).values()))
        case list():
            values = cast(list[object], found)
            return 0 if values and type(values[0]) is int else sum(map(_text_bytes, values))
        case _:
            return 0


def answered(body: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def too_large() -> HttpProblem:
    message = f"the body has more than {MAX_JSON_BYTES:,} bytes; a document goes to POST /v1/contexts/NAME"
    return HttpProblem(413, message)  # what still comes is thrown away: a closed connection would not let this be read


def decode(content: bytes | bytearray) -> object:
    """Raises HttpProblem for what is no JSON, or says a thing twice, or has no meaning in UTF-8, or has too many
    values."""
    _check_size(content)
    try:
        found = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_no_number)
        if _SURROGATE.search(content):
            _check_texts(found)
    except UnicodeDecodeError as error:
        raise HttpProblem(400, f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise HttpProblem(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise HttpProblem(400, f"the body is no JSON: {error}") from None
    return found


def _check_size(content: bytes | bytearray) -> None:
    """Raises HttpProblem for more values than a decoder makes in a short time."""
    if sum(map(content.count, (b",", b"[", b"{"))) <= MAX_VALUES:  # in texts or not
        return
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # what quotes are left begin and end texts
    num_values, num_commas = bare.count(b'"') // 2, 0
    if num_values <= MAX_VALUES:
        outside = b"".join(bare.split(b'"')[::2])
        num_values += outside.count(b"[") + outside.count(b"{")
        num_commas = outside.count(b",")
    if num_values > MAX_VALUES or num_commas > MAX_COMMAS:
        message = f"the body has more than {MAX_VALUES:,} texts, objects and arrays, or {MAX_COMMAS:,} numbers"
        raise HttpProblem(413, message)


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
    """`raw` as the struct. Raises HttpProblem that names the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        match = PATH.match(str(error))
        path, reported = (match["path"] or "", match["told"]) if match is not None else ("", str(error))
        param = ".".join(filter(None, (parent, path))) or None
        raise HttpProblem(400, f"{param or 'the body'}: {reported}", param=param, code="invalid_type") from None
    except (OverflowError, RecursionError) as error:
        raise HttpProblem(400, f"the body: {error}") from None
