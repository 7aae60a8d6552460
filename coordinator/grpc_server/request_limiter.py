"""Requests on their way in: how many calls may be open, how large a request may be, and that large ones take turns."""

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
"""Bytes of a piece of an ingest or import, whose streams may all send one at the same time: ids take nine times as much
until they are counted."""
MAX_SMALL_BYTES = 64 << 10
"""Bytes of a request of all other methods; and what is parsed without being looked through."""
MAX_FIELDS = 4096
"""Fields of a request that is not small, its messages' included: fields take far longer to parse than bytes."""
MAX_CALLS = 8192
"""Calls that are open at once."""
SHARE = 0.75
"""The part of the open calls that one host may have, and of `MAX_HELD_BYTES` that one tenant may have; one host, if all
calls are from one tenant."""
MAX_HELD_BYTES = 64 << 20
"""Bytes of all large requests that are not answered yet."""
ARRIVAL_SECONDS = 120.0
"""How long the request of a call may be on its way."""
RETRY_SECONDS = 1.0
QUIET_SECONDS = 0.25
"""A client that may not be ended while it sends is taken for silent when nothing has come for so long."""
DRAIN_SECONDS = 5.0
"""How long such a client may go on to send."""
LOSSY_LIBRARY = "grpc-python-asyncio/"
"""Takes INTERNAL for the status of a call that ends while it sends (issue 36066 of gRPC)."""
LIMITS: dict[str, int] = {
    **dict.fromkeys(("Generate", "CountTokens", "Tokenize", "Detokenize"), MAX_REQUEST_BYTES),
    **dict.fromkeys(("IngestContext", "ImportContext", "VerifyCluster"), MAX_PIECE_BYTES),
}
"""Bytes of a request, by the methods that take long texts or token ids."""
FIELDS_APART: dict[str, dict[str, int]] = {"IngestContext": {"IngestFile": 3 * MAX_FILES}}
"""Messages of which a request may have many, by methods, and how many fields: a file is one, and has two."""

# The library types these loosely, or not at all.
_untyped: Any = grpc.aio
EOF = _untyped.EOF
StreamCall = Any
Handler = Any


class RequestLimiter:
    """Lets in the requests of all calls of a server, as many and as large as it can bear."""

    def __init__(
        self,
        max_calls: int = MAX_CALLS,
        max_held_bytes: int = MAX_HELD_BYTES,
        arrival_seconds: float = ARRIVAL_SECONDS,
        share: float = SHARE,
    ) -> None:
        """One host may have open a `share` of the calls, and one tenant may hold a `share` of the bytes."""
        self.arrival_seconds = arrival_seconds
        self._max_calls = max_calls
        self._most_of_host = math.ceil(max_calls * share)
        self._max_held = max_held_bytes
        self._most_held_by_client = math.floor(max_held_bytes * share)
        self._num_calls = 0
        self._calls = Counter[str]()
        """Open ones by host."""
        self._num_held = 0
        self._held = Counter[str]()
        """Bytes by tenant, or by host where all calls are of one tenant."""
        self._thread = TokenizerPool(1, tenant=_client_key)

    @contextmanager
    def of(self, method: str, handler: Handler, host: str) -> Generator["RequestReader", None, None]:
        """The requests of one call from `host`, which is open meanwhile. Raises ResourceExhausted."""
        if self._num_calls >= self._max_calls:
            raise ResourceExhausted("calls", f"{self._max_calls:,} are open already", RETRY_SECONDS)
        if self._calls[host] >= (most := self._most_of_host):
            raise ResourceExhausted("calls", f"{most:,} from your host are open already", RETRY_SECONDS)
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

    def hold(self, num_bytes: int) -> str:
        """The client for which they are held. Raises ResourceExhausted when requests that are held leave no room for
        one of so many bytes."""
        client = _client_key()
        if self._num_held + num_bytes > self._max_held:
            text = f"with {num_bytes:,} bytes more, those that wait for an answer have more than {self._max_held:,}"
            raise ResourceExhausted("requests", text, RETRY_SECONDS)
        if self._held[client] + num_bytes > (most := self._most_held_by_client):
            text = f"with {num_bytes:,} bytes more, yours that wait for an answer have more than {most:,}"
            raise ResourceExhausted("requests", text, RETRY_SECONDS)
        self._num_held += num_bytes
        self._held[client] += num_bytes
        return client

    def release(self, client: str, num_bytes: int) -> None:
        self._num_held -= num_bytes
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]

    async def parse(self, data: bytes, descriptor: MethodDescriptor, handler: Handler) -> object:
        """Raises InvalidArgument. Large requests are parsed one at a time in a thread, in turns by tenant, or by host
        where all are of one tenant: four million token ids take 14 to 40 ms, and counting fields up to the limit takes
        12."""
        if len(data) <= MAX_SMALL_BYTES:
            return _parse(data, handler)
        waiting = [data]
        try:
            return await self._thread.run(_parse_large, waiting, descriptor, handler)
        finally:
            waiting.clear()  # a call that was cancelled keeps its place in the queue, but not its request

    async def close(self) -> None:
        """Parses no more large requests. Idempotent."""
        await self._thread.close()


class RequestReader:
    """The requests of one call."""

    def __init__(self, gate: RequestLimiter, method: str, handler: Handler) -> None:
        self._gate = gate
        self._handler = handler
        self._descriptor = Default().FindMethodByName(method.lstrip("/").replace("/", "."))
        self._client, self._num_held = "", 0

    async def one(self, call: StreamCall) -> object:
        """The only one. It is held until it is released. Raises InvalidArgument, ResourceExhausted, and
        DeadlineExceeded when it does not come."""
        seconds = self._gate.arrival_seconds
        try:
            async with asyncio.timeout(seconds):
                data = await call.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no request came within {human_seconds(seconds)}") from None
        if data is EOF:
            raise InvalidArgument("request", "is missing")
        self._check_size(data)
        if len(data) > MAX_SMALL_BYTES:
            self._client = self._gate.hold(len(data))
            self._num_held = len(data)
        return await self._gate.parse(data, self._descriptor, self._handler)

    async def all(self, call: StreamCall) -> AsyncGenerator[object, None]:
        """One after another. Raises InvalidArgument."""
        while (request := await self._next(call)) is not EOF:
            yield request
            del request  # the next one may be long in coming

    async def _next(self, call: StreamCall) -> object:
        data = await call.read()
        if data is EOF:
            return EOF
        self._check_size(data)
        return await self._gate.parse(data, self._descriptor, self._handler)

    async def drain(self, call: StreamCall) -> None:
        """Before a call ends with an error: reads on until its client pauses, if that would not hear the error else."""
        if not _loses_status(call):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                data = None
                while data is not EOF:
                    async with asyncio.timeout(QUIET_SECONDS):
                        data = await call.read()

    def release(self) -> None:
        """What was held need not be counted any more."""
        self._gate.release(self._client, self._num_held)
        self._num_held = 0

    def _check_size(self, data: bytes) -> None:
        name = self._descriptor.name
        limit = LIMITS.get(name, MAX_SMALL_BYTES)
        if len(data) > limit:
            raise InvalidArgument("request", f"has {len(data):,} bytes, {name} takes at most {limit:,}")


def _loses_status(call: StreamCall) -> bool:
    """The clients of this project use that library, too, but look what it was told."""
    agent = next((str(value) for key, value in call.invocation_metadata() if key == "user-agent"), "")
    return LOSSY_LIBRARY in agent and not agent.startswith(CLIENT_NAME)


def _client_key() -> str:
    """The tenant of the call for which code runs; its host where all calls are of one tenant."""
    caller, record = CALLER.get(OWNER), CURRENT.get()
    return record.host if caller.is_alone and record is not None else caller.tenant


def _parse_large(waiting: list[bytes], descriptor: MethodDescriptor, handler: Handler) -> object:
    [data] = waiting
    if has_more_fields(data, descriptor.input_type, MAX_FIELDS, FIELDS_APART.get(descriptor.name, {})):
        message = f"has {len(data):,} bytes and more than {MAX_FIELDS:,} fields; numbers must be packed"
        raise InvalidArgument("request", message)
    return _parse(data, handler)


def _parse(data: bytes, handler: Handler) -> object:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        message = f"is not a valid message (strings must be UTF-8): {error}"
        raise InvalidArgument("request", message) from None
