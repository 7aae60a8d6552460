"""Bodies: of requests strict JSON of a bounded size, of bounded sizes together; of answers JSON."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any, Self, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from door.errors import Problem, unavailable
from longleaf.config import MAX_REQUEST_BYTES

MAX_JSON_BYTES = MAX_REQUEST_BYTES + (1 << 19)
"""What the service takes at once, and some for what JSON says in more bytes."""
MAX_VALUES = 50_000
"""Texts, objects and arrays of a body. To make so many takes the interpreter a tenth of a second."""
MAX_COMMAS = 1 << 19
"""Between all values: a prompt may be a long list of numbers."""
MAX_HELD_BYTES = 64 << 20
"""Of all bodies that come or are decoded; what has more to say comes again."""
PART_SECONDS = 30.0
"""How long the next part of a body may take."""
BODY_SECONDS = 60.0
"""How long all of its parts may."""
LARGE_BYTES = 1 << 18
"""What is larger is decoded beside the event loop, one after the other: together they would keep everybody waiting."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Body = TypeVar("Body", bound=msgspec.Struct)
PATH = re.compile(r"^(?P<told>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)


class Bodies:
    """Takes in what callers send; bounds what it holds of all of them, and how long it waits for each."""

    def __init__(
        self, max_bytes: int = MAX_HELD_BYTES, *, part_seconds: float = PART_SECONDS, seconds: float = BODY_SECONDS
    ) -> None:
        self._held = Held(max_bytes)
        self._part_seconds, self._seconds = part_seconds, seconds
        self._decoding = asyncio.Lock()

    def audit(self) -> None:
        """While nobody sends anything, nothing is held."""
        assert self._held.num_bytes == 0, f"{self._held.num_bytes} bytes are still counted"

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The object that the body is. Raises Problem."""
        with Share(self._held) as share:
            content = await self._read(request, share)
            if len(content) > LARGE_BYTES:
                async with self._decoding:
                    decoded = await asyncio.to_thread(decode, content)
            else:
                decoded = decode(content)
        if not isinstance(decoded, dict):
            raise Problem(400, "the body is no JSON object")
        return cast(dict[str, Any], decoded)

    async def _read(self, request: Request, share: "Share") -> bytearray:
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
            raise Problem(408, "the body did not come", headers={"connection": "close"}) from None
        except ClientDisconnect:
            raise Problem(400, "the body ended before its end") from None
        return content

    async def _next(self, stream: AsyncGenerator[bytes, None]) -> bytes | None:
        async with asyncio.timeout(self._part_seconds):
            return await anext(stream, None)


class Held:
    """What all bodies together have, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0


class Share:
    """What one body has of it, to be entered."""

    def __init__(self, held: Held) -> None:
        self._held, self._num_bytes = held, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.num_bytes -= self._num_bytes

    def grow(self, num_bytes: int) -> None:
        """Has it be so many at least. Raises Problem for more than one body may have, or than there is room for."""
        if num_bytes > MAX_JSON_BYTES:
            raise too_large()
        more = max(0, num_bytes - self._num_bytes)
        if self._held.num_bytes + more > self._held.max_bytes:
            told = "the door takes in as much as it can, come again"
            raise unavailable(told)
        self._num_bytes += more
        self._held.num_bytes += more


async def json_of(request: Request) -> dict[str, Any]:
    """The object that the body of a request is. Raises Problem."""
    bodies: Bodies = request.app.state.bodies
    return await bodies.read_json(request)


def answered(body: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def too_large() -> Problem:
    told = f"the body has more than {MAX_JSON_BYTES:,} bytes; a document goes to POST /v1/contexts/NAME"
    return Problem(413, told)  # what still comes is thrown away: a closed connection would not let this be read


def decode(content: bytes | bytearray) -> object:
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


def _check_size(content: bytes | bytearray) -> None:
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
