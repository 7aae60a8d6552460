"""Calls to one service, with typed errors, timeouts and retries."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar, cast

import grpc

from longleaf.client.addresses import speaks_tls
from longleaf.client.callbacks import Callback
from longleaf.client.channels import Access, BearerChannel, check_credential, is_encrypted, open_channel
from longleaf.client.retries import Attempts, Retries, Retry
from longleaf.codec.status import BROKEN_SEND, decode_error, is_cut_off
from longleaf.errors import Cancelled, InvalidArgument, LongleafError, Unavailable

T = TypeVar("T")
STATUS_SECONDS = 2.0
"""Longest wait for the status of a call after sending has failed."""
LOOK_SECONDS = 0.01
OWN = "--tls-cert and --tls-key, or LONGLEAF_TLS_CERT and LONGLEAF_TLS_KEY"


class Calls:
    """A channel to `server`. Requests and responses are protobuf messages; the generated stubs carry no types."""

    def __init__(
        self, server: str, access: Access, retries: Retries, on_retry: Callback[Retry], called: str = ""
    ) -> None:
        """`called` is the name of the service in error messages, by default its address. Raises InvalidArgument."""
        self.server = server
        self.called = called or server
        self.channel: Any = open_channel(server, access)
        self._access = access
        self._is_plain = not is_encrypted(access)
        self._retries = retries
        self._on_retry = on_retry
        self._answered = asyncio.Event()
        """Set once the service has answered a call."""
        self._is_closed = False

    def with_credential(self, credential: str) -> "Calls":
        """A view that shares the channel and sends another credential. Raises InvalidArgument."""
        check_credential(credential, self.server, self._access)
        view = copy(self)
        view.channel = BearerChannel(self.channel, credential)
        return view

    async def close(self) -> None:
        """Closes the channel and all calls on it."""
        self._is_closed = True
        await self.channel.close()

    def attempts(self, name: str, timeout: float | None) -> Attempts:
        """The attempts of one call, which together may take `timeout` seconds."""
        return Attempts(name, timeout, self._retries, self._on_retry, self._explain, self._answered.is_set)

    async def _explain(self, error: LongleafError) -> LongleafError:
        """Returns a more specific error if the TLS settings explain a failed connection, else `error`."""
        if not is_cut_off(error):
            return error
        if not self._is_plain:
            return Unavailable(f"{error}; the service may require a client certificate: {OWN}")
        if await speaks_tls(self.server):
            message = f"{self.called} requires TLS: give its certificate authority here or in LONGLEAF_TLS_CA"
            return InvalidArgument("tls_ca", message)
        return error

    @contextmanager
    def typed(self) -> Generator[None, None, None]:
        """Converts gRPC errors to those of `longleaf.errors`."""
        try:
            yield
        except grpc.RpcError as error:
            raise decode_error(error, self.called) from None
        except (grpc.aio.BaseError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if self._is_closed:
                raise Cancelled("the client was closed") from None
            # gRPC cancels a call that ended while a request was being sent.
            raise Unavailable(f"{self.called} ended the call") from None

    def decoded(self, decode: Callable[[Any], T], response: object) -> T:
        """The decoded response. Raises LongleafError if this client cannot decode it."""
        try:
            if response is None:  # gRPC's result for bytes that do not parse as the message
                raise ValueError("the bytes are not a message of the expected type")
            found = decode(response)
        except Exception as error:  # any decoding error is the server's fault
            raise LongleafError(f"{self.called} sent a response that this client cannot decode: {error}") from error
        self._answered.set()
        return found

    async def unary(
        self,
        method: Any,
        request: object,
        attempts: Attempts,
        decode: Callable[[Any], T],
        *,
        is_repeatable: bool = False,
    ) -> T:
        """The decoded response. `is_repeatable` marks an idempotent call."""
        while True:
            try:
                with self.typed():
                    response = await method(request, timeout=attempts.time_left())
                return self.decoded(decode, response)
            except LongleafError as error:
                await attempts.wait(error, is_repeatable=is_repeatable)

    async def read(
        self, method: Any, name: str, request: object, decode: Callable[[Any], T], timeout: float | None
    ) -> T:
        """The decoded response of a call that only reads."""
        attempts = self.attempts(name, timeout)
        return await self.unary(method, request, attempts, decode, is_repeatable=True)

    async def once(
        self, method: Any, name: str, request: object, decode: Callable[[Any], T], timeout: float | None
    ) -> T:
        """The decoded response of a call that is not idempotent."""
        return await self.unary(method, request, self.attempts(name, timeout), decode)

    async def stream(
        self, method: Any, request: object, attempts: Attempts, decode: Callable[[Any], T]
    ) -> AsyncGenerator[T, None]:
        """The decoded responses. The call is retried only before the first response. Closing the iterator cancels
        it."""
        has_begun = False
        while True:
            with self.typed():
                call = method(request, timeout=attempts.time_left())
            try:
                with self.typed():
                    async for response in call:
                        if not has_begun:  # the request may be large, and gRPC keeps it until the call ends
                            has_begun, request = True, None
                            cast(dict[str, object], vars(call)).pop("_request", None)
                        yield self.decoded(decode, response)
                return
            except LongleafError as error:
                if has_begun:
                    raise
                await attempts.wait(error, is_repeatable=True)
            finally:
                call.cancel()


class CallOutcome:
    """The final status of a call with a request stream. gRPC sets INTERNAL when sending fails (gRPC issue 36066),
    either before the server's status arrives or in its place."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._error: grpc.RpcError | None = None
        call.add_done_callback(self._look)

    def _look(self, _: object = None) -> None:
        """Records the first status from the server. gRPC may replace it later."""
        code, details = _at_once(self._call.code()), _at_once(self._call.details())
        if self._error is None and code != grpc.StatusCode.OK and details != BROKEN_SEND:
            trailers, none = _at_once(self._call.trailing_metadata()), grpc.aio.Metadata()
            self._error = grpc.aio.AioRpcError(code, none, trailers, details)

    async def error(self, raised: grpc.RpcError) -> grpc.RpcError:
        """The error that the server sent, or `raised` (from gRPC) if none arrives within STATUS_SECONDS."""
        deadline = time.monotonic() + (STATUS_SECONDS if raised.details() == BROKEN_SEND else 0.0)
        self._look()
        while self._error is None and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)  # gRPC runs no callback when it replaces a status
            self._look()
        return self._error or raised


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not suspend."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine suspended: the call has not ended")


def is_cancelled() -> bool:
    """Whether the running task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def nothing(_: object) -> None:
    """Decoder for an empty response."""
