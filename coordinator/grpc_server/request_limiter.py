"""Limits of incoming requests: the number of open calls, the size of a request, and fair scheduling of large ones."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError

from coordinator.auth.caller import CALLER, OWNER
from coordinator.telemetry.observers import CURRENT
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.codec import has_more_fields
from longleaf.config import CLIENT_NAME, MAX_REQUEST_BYTES
from longleaf.document_text import MAX_FILES
from longleaf.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from longleaf.formatting import human_seconds

MAX_PIECE_BYTES = 1 << 20
"""Maximum size in bytes of a chunk of an ingest or import. All streams may send a chunk at the same time, and token ids
take nine times as much memory until they are counted."""
MAX_SMALL_BYTES = 64 << 10
"""Maximum size in bytes of a request of the methods not in LIMITS. Requests up to this size are parsed without counting
their fields."""
MAX_FIELDS = 4096
"""Maximum number of fields of a larger request, including nested ones. Fields take far longer to parse than bytes."""
MAX_CALLS = 8192
"""Maximum number of open calls."""
SHARE = 0.75
"""Maximum share of `MAX_CALLS` for one host, and of `MAX_PENDING_BYTES` for one tenant. If all calls belong to one
tenant, the latter applies to one host."""
MAX_PENDING_BYTES = 64 << 20
"""Maximum total bytes of the large requests whose calls have not been answered."""
ARRIVAL_SECONDS = 120.0
"""Seconds within which the request of a call must arrive."""
RETRY_SECONDS = 1.0
QUIET_SECONDS = 0.25
"""A client that must not be interrupted while it sends counts as silent after this many seconds without data."""
DISCARD_SECONDS = 5.0
"""Maximum seconds for which such a client may continue to send."""
LOSSY_LIBRARY = "grpc-python-asyncio/"
"""This library reports INTERNAL for a call that ends while it sends (gRPC issue 36066)."""
LIMITS: dict[str, int] = {
    **dict.fromkeys(("Generate", "CountTokens", "Tokenize", "Detokenize"), MAX_REQUEST_BYTES),
    **dict.fromkeys(("IngestContext", "ImportContext", "VerifyCluster"), MAX_PIECE_BYTES),
}
"""Maximum size of a request in bytes, for methods that accept long texts or token ids."""
FIELDS_APART: dict[str, dict[str, int]] = {"IngestContext": {"IngestFile": 3 * MAX_FILES}}
"""Separate field limits, by method and message, for messages that a request may repeat often. Each file counts as three
fields: the message itself and its two fields."""

# The library has loose types, or none, for these.
_untyped: Any = grpc.aio
EOF = _untyped.EOF
StreamCall = Any
Handler = Any


class RequestLimiter:
    """Limits the number and size of the requests of all calls of a server."""

    def __init__(
        self,
        max_calls: int = MAX_CALLS,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        arrival_seconds: float = ARRIVAL_SECONDS,
        share: float = SHARE,
    ) -> None:
        """`share` is the largest part of `max_calls` for one host, and of `max_pending_bytes` for one tenant."""
        self.arrival_seconds = arrival_seconds
        self._max_calls = max_calls
        self._most_of_host = math.ceil(max_calls * share)
        self._max_pending = max_pending_bytes
        self._max_pending_of_client = math.floor(max_pending_bytes * share)
        self._num_calls = 0
        self._calls = Counter[str]()
        """Open calls by host."""
        self._pending = Counter[str]()
        """Bytes by tenant, or by host if all calls belong to one tenant."""
        self._thread = TokenizerPool(1, tenant=_client_key)

    @contextmanager
    def admit(self, method: str, handler: Handler, host: str) -> Generator["RequestReader", None, None]:
        """Counts a call from `host` while the body runs, and yields the reader of its requests. Raises
        ResourceExhausted."""
        if self._num_calls >= self._max_calls:
            raise ResourceExhausted("calls", f"{self._max_calls:,} are open, which is the limit", RETRY_SECONDS)
        if self._calls[host] >= (most := self._most_of_host):
            raise ResourceExhausted("calls", f"{most:,} from your host are open, which is the limit", RETRY_SECONDS)
        self._calls[host] += 1
        self._num_calls += 1
        incoming = RequestReader(self, method, handler)
        try:
            yield incoming
        finally:
            incoming.release()
            self._num_calls -= 1
            self._calls[host] -= 1
            if not self._calls[host]:
                del self._calls[host]

    def reserve(self, num_bytes: int) -> str:
        """Reserves memory and returns the client that it is charged to. Raises ResourceExhausted if a limit would be
        exceeded."""
        client = _client_key()
        if self._pending.total() + num_bytes > self._max_pending:
            text = f"with {num_bytes:,} more bytes, pending requests exceed the limit of {self._max_pending:,} bytes"
            raise ResourceExhausted("requests", text, RETRY_SECONDS)
        if self._pending[client] + num_bytes > (most := self._max_pending_of_client):
            text = f"with {num_bytes:,} more bytes, your pending requests exceed the limit of {most:,} bytes"
            raise ResourceExhausted("requests", text, RETRY_SECONDS)
        self._pending[client] += num_bytes
        return client

    def release(self, client: str, num_bytes: int) -> None:
        self._pending[client] -= num_bytes
        if not self._pending[client]:
            del self._pending[client]

    async def parse(self, data: bytes, descriptor: MethodDescriptor, handler: Handler) -> object:
        """Parses a request. Raises InvalidArgument. Large requests are parsed one at a time in a thread, because four
        million token ids take 14 to 40 ms, and counting fields up to the limit takes 12 ms. Tenants take turns; if all
        calls belong to one tenant, hosts do."""
        if len(data) <= MAX_SMALL_BYTES:
            return _parse(data, handler)
        waiting = [data]
        try:
            return await self._thread.run(_parse_large, waiting, descriptor, handler)
        finally:
            waiting.clear()  # a cancelled call keeps its place in the queue, but not its request

    async def close(self) -> None:
        """Stops the parsing of large requests. Idempotent."""
        await self._thread.close()


class RequestReader:
    """Reads the requests of one call."""

    def __init__(self, gate: RequestLimiter, method: str, handler: Handler) -> None:
        self._limiter = gate
        self._handler = handler
        self._descriptor = Default().FindMethodByName(method.lstrip("/").replace("/", "."))
        self._client, self._num_pending = "", 0

    async def read_one(self, call: StreamCall) -> object:
        """Reads the request of a call that has only one. Its bytes count until `release`. Raises InvalidArgument,
        ResourceExhausted, and DeadlineExceeded if it does not arrive in time."""
        seconds = self._limiter.arrival_seconds
        try:
            async with asyncio.timeout(seconds):
                data = await call.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no request came within {human_seconds(seconds)}") from None
        if data is EOF:
            raise InvalidArgument("request", "is missing")
        self._check_size(data)
        if len(data) > MAX_SMALL_BYTES:
            self._client = self._limiter.reserve(len(data))
            self._num_pending = len(data)
        return await self._limiter.parse(data, self._descriptor, self._handler)

    async def read_all(self, call: StreamCall) -> AsyncGenerator[object, None]:
        """Yields all requests. Raises InvalidArgument."""
        while (request := await self._read_next(call)) is not EOF:
            yield request
            del request  # the next one may take long to arrive

    async def _read_next(self, call: StreamCall) -> object:
        data = await call.read()
        if data is EOF:
            return EOF
        self._check_size(data)
        return await self._limiter.parse(data, self._descriptor, self._handler)

    async def discard_rest(self, call: StreamCall) -> None:
        """Must be called before a call ends with an error. If the client's library would lose the status, discards
        requests until the client pauses."""
        if not _loses_status(call):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                data = None
                while data is not EOF:
                    async with asyncio.timeout(QUIET_SECONDS):
                        data = await call.read()

    def release(self) -> None:
        """Releases the memory reserved for the request."""
        self._limiter.release(self._client, self._num_pending)
        self._num_pending = 0

    def _check_size(self, data: bytes) -> None:
        name = self._descriptor.name
        limit = LIMITS.get(name, MAX_SMALL_BYTES)
        if len(data) > limit:
            raise InvalidArgument("request", f"has {len(data):,} bytes; the limit of {name} is {limit:,}")


def _loses_status(call: StreamCall) -> bool:
    """Whether the client's library loses the status of a call that ends while it sends. The project's own clients use
    that library too, but retrieve the status that it received."""
    agent = next((str(value) for key, value in call.invocation_metadata() if key == "user-agent"), "")
    return LOSSY_LIBRARY in agent and not agent.startswith(CLIENT_NAME)


def _client_key() -> str:
    """The tenant of the current call; its host if all calls belong to one tenant."""
    caller, record = CALLER.get(OWNER), CURRENT.get()
    return record.host if caller.is_alone and record is not None else caller.tenant


def _parse_large(waiting: list[bytes], descriptor: MethodDescriptor, handler: Handler) -> object:
    [data] = waiting
    if has_more_fields(data, descriptor.input_type, MAX_FIELDS, FIELDS_APART.get(descriptor.name, {})):
        message = (
            f"has {len(data):,} bytes and more than {MAX_FIELDS:,} fields: use packed encoding for repeated numbers"
        )
        raise InvalidArgument("request", message)
    return _parse(data, handler)


def _parse(data: bytes, handler: Handler) -> object:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        message = f"is not a valid message (strings must be UTF-8): {error}"
        raise InvalidArgument("request", message) from None
