"""Request bodies, which are strict JSON with limits on size and total memory, and JSON responses."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Callable, Container, Mapping
from typing import Any, Self, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.errors import HttpProblem, busy
from longleaf.config import MAX_REQUEST_BYTES

MAX_JSON_BYTES = MAX_REQUEST_BYTES + (1 << 19)
"""The service's limit, plus a margin for JSON's escaping."""
MAX_VALUES = 50_000
"""Limit of strings, objects and arrays per body. The interpreter creates that many in a tenth of a second."""
MAX_COMMAS = 1 << 19
"""Limit of commas between values; higher, because a prompt may be a long list of numbers."""
MAX_PENDING_BYTES = 64 << 20
"""Limit for all bodies being received or decoded, and for prompts until the service answers; further requests get 503.
"""
COPIES = 2
"""Copies of a prompt while it is sent to the service: the message, and its encoded form."""
PART_SECONDS = 30.0
"""Timeout for the next part of a body."""
BODY_SECONDS = 60.0
"""Timeout for a complete body."""
LARGE_BYTES = 1 << 18
"""Larger bodies are decoded outside the event loop, one at a time, to keep the loop responsive."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Body = TypeVar("Body", bound=msgspec.Struct)
T = TypeVar("T")
EMPTY: tuple[object, ...] = (None, [], {}, "")
"""Accepted values of unsupported fields of messages and their parts, which clients repeat from earlier answers."""
PATH = re.compile(r"^(?P<message>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)


class BodyReader:
    """Reads request bodies, with limits on total memory and on time."""

    def __init__(
        self, max_bytes: int = MAX_PENDING_BYTES, *, part_seconds: float = PART_SECONDS, seconds: float = BODY_SECONDS
    ) -> None:
        self._budget = MemoryBudget(max_bytes)
        self._part_seconds, self._seconds = part_seconds, seconds
        self._decoding = asyncio.Lock()

    def audit(self) -> None:
        """Checks that no memory is leased while no request is open."""
        assert self._budget.num_bytes == 0, f"{self._budget.num_bytes} bytes are still counted"

    def share(self) -> "MemoryLease":
        """An empty lease of the common memory budget."""
        return MemoryLease(self._budget)

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body. Raises HttpProblem."""
        with self.share() as share:
            return (await self._decoded(request, share, _itself))[0]

    async def read(self, request: Request, share: "MemoryLease", convert: Callable[[dict[str, Any]], T]) -> T:
        """The result of `convert` for the JSON object in the body; `share` holds its memory from then on. Raises
        HttpProblem."""
        converted, num_bytes = await self._decoded(request, share, convert)
        share.grow_decoded(num_bytes)
        return converted

    async def _decoded(
        self, request: Request, share: "MemoryLease", convert: Callable[[dict[str, Any]], T]
    ) -> tuple[T, int]:
        content = await self._read(request, share)
        if len(content) <= LARGE_BYTES:
            return _decode_as(convert, content)
        async with self._decoding:  # Python objects take ten times the size, so one body is decoded at a time
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
            raise HttpProblem(408, "the body was not received in time", headers={"connection": "close"}) from None
        except ClientDisconnect:
            raise HttpProblem(400, "the body is incomplete") from None
        return content

    async def _next(self, stream: AsyncGenerator[bytes, None]) -> bytes | None:
        async with asyncio.timeout(self._part_seconds):
            return await anext(stream, None)


class MemoryBudget:
    """Memory budget of all bodies, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0


class MemoryLease:
    """A context manager that holds the memory of one body."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._num_bytes = budget, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Frees the memory. Idempotent."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Grows the lease to at least `num_bytes`. Raises HttpProblem beyond the limit per body, or if the budget is
        exhausted."""
        if num_bytes > MAX_JSON_BYTES:
            raise too_large()
        self.grow_decoded(num_bytes)

    def grow_decoded(self, num_bytes: int) -> None:
        """The same for a decoded body."""
        more = max(0, num_bytes - self._num_bytes)
        if self._budget.num_bytes + more > self._budget.max_bytes:
            raise busy("it is receiving as much as it can")
        self._num_bytes += more
        self._budget.num_bytes += more


async def json_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises HttpProblem."""
    bodies: BodyReader = request.app.state.bodies
    return await bodies.read_json(request)


def share_of(request: Request) -> MemoryLease:
    """An empty lease of the gateway's memory budget."""
    bodies: BodyReader = request.app.state.bodies
    return bodies.share()


async def body_of(request: Request, share: MemoryLease, convert: Callable[[dict[str, Any]], T]) -> T:
    """The result of `convert` for the JSON object in the body of a request. Raises HttpProblem."""
    bodies: BodyReader = request.app.state.bodies
    return await bodies.read(request, share, convert)


def _itself(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _decode_as(convert: Callable[[dict[str, Any]], T], content: bytearray) -> tuple[T, int]:
    """The result of `convert` for a JSON object, and its memory including copies. Raises HttpProblem."""
    decoded = decode(content)
    if not isinstance(decoded, dict):
        raise HttpProblem(400, "the body is not a JSON object")
    found = cast(dict[str, Any], decoded)
    num_bytes = max(COPIES * len(content), _text_bytes(found))
    return convert(found), num_bytes


def _text_bytes(found: object) -> int:
    """Memory of all strings. A single character beyond the BMP makes Python use four bytes for each character of its
    string."""
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


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def json_fields(struct: msgspec.Struct, names: str) -> dict[str, Any]:
    """The fields with these names, separated by spaces. The JSON name of a predicate has no `is_`."""
    kept = set(struct.__struct_fields__)
    return {name: getattr(struct, name if name in kept else f"is_{name}") for name in names.split()}


def too_large() -> HttpProblem:
    message = f"the body has more than {MAX_JSON_BYTES:,} bytes; send documents to POST /v1/contexts/NAME"
    return HttpProblem(413, message)  # further data is discarded, because closing the connection would lose this answer


def decode(content: bytes | bytearray) -> object:
    """Raises HttpProblem for invalid JSON, duplicate keys, invalid Unicode, or too many values."""
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
        raise HttpProblem(400, f"the body is not JSON: {error}") from None
    return found


def _check_size(content: bytes | bytearray) -> None:
    """Raises HttpProblem for more values than can be decoded quickly."""
    if sum(map(content.count, (b",", b"[", b"{"))) <= MAX_VALUES:  # an upper bound that includes characters in strings
        return
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes delimit strings
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
        raise ValueError("an object has a name twice")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _check_texts(found: object) -> None:
    """Raises ValueError for an unpaired surrogate."""
    match found:
        case str():
            try:
                found.encode()
            except UnicodeEncodeError:
                raise ValueError("a string has a lone surrogate") from None
        case dict():
            for name, value in cast(dict[str, object], found).items():
                _check_texts(name)
                _check_texts(value)
        case list():
            for value in cast(list[object], found):
                _check_texts(value)
        case _:
            pass


def used_fields(given: Mapping[str, Any], kind: type[msgspec.Struct], ignored: Container[str]) -> dict[str, Any]:
    """The fields of a message or a part of one for `converted`: without empty ones that the struct does not have, and
    without `ignored` ones."""
    known = kind.__struct_fields__
    return {
        name: value
        for name, value in given.items()
        if value is not None and name not in ignored and (name in known or value not in EMPTY)
    }


def converted(raw: object, kind: type[Body], parent: str = "") -> Body:
    """`raw` as the struct. Raises HttpProblem that names the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        match = PATH.match(str(error))
        path, reason = (match["path"] or "", match["message"]) if match is not None else ("", str(error))
        param = ".".join(filter(None, (parent, path))) or None
        raise HttpProblem(400, f"{param or 'the body'}: {reason}", param=param, code="invalid_type") from None
    except (OverflowError, RecursionError) as error:
        raise HttpProblem(400, f"the body: {error}") from None
