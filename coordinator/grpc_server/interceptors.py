"""The processing common to all calls: authentication, observers, and the conversion of errors to statuses."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from coordinator.auth.auth_throttle import AuthFailureThrottle
from coordinator.auth.authenticator import Authenticator
from coordinator.auth.caller import CALLER
from coordinator.auth.permissions import check_role
from coordinator.grpc_server.call_metadata import certified_names, plain_headers
from coordinator.grpc_server.readiness_gate import SERVED, ReadinessGate
from coordinator.grpc_server.request_limiter import Handler, RequestLimiter, RequestReader, StreamCall
from coordinator.grpc_server.tenant_scoping import redact_error, unscope_error
from coordinator.grpc_server.unauthenticated_limiter import UnauthenticatedCallLimiter
from coordinator.telemetry.observers import CURRENT, CallRecord, Observers
from longleaf.codec.status import DETAILS_KEY, encode_error, grpc_code
from longleaf.errors import InvalidArgument, LongleafError, ResourceExhausted, Unauthenticated, Unavailable
from longleaf.formatting import human_seconds

logger = logging.getLogger(__name__)

Refusal = tuple[Any, ...]
"""A status code, its message, and the trailing metadata."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
    """Authenticates every call first, reads its requests, and converts every LongleafError to its status and every
    other exception to INTERNAL. A stream that its client does not read for `unread_timeout` seconds is ended.

    Every method is served as a bidirectional stream, which is identical on the wire. Requests then arrive as bytes when
    they are read, and the library holds none of them during the call.
    """

    def __init__(
        self,
        readiness: ReadinessGate,
        gate: RequestLimiter,
        unread_timeout: float,
        authenticator: Authenticator,
        observers: Observers,
    ) -> None:
        self._readiness = readiness
        self._gate = gate
        self._unauthenticated = UnauthenticatedCallLimiter()
        self._unread_timeout = unread_timeout
        self._authenticator = authenticator
        self._observers = observers
        self._refusals = AuthFailureThrottle()

    async def close(self) -> None:
        """Stops the parsing of large requests."""
        await self._gate.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method
        method = name.decode() if isinstance(name, bytes) else name

        async def answer(_: object, call: StreamCall) -> None:
            if not method.startswith(SERVED):
                record = CallRecord(method, call.peer(), {})
                await _answer(record, self._serve(record, handler, call), call)
                return
            record = CallRecord(method, call.peer(), plain_headers(call))
            CURRENT.set(record)
            with self._observers.observe_call(record):
                await _answer(record, self._serve(record, handler, call), call)

        untyped: Any = grpc
        return untyped.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    async def _serve(self, record: CallRecord, handler: Handler, call: StreamCall) -> None:
        is_served = record.method.startswith(SERVED)
        room = self._gate if is_served else self._unauthenticated
        with room.admit(record.method, handler, record.host) as incoming:
            try:
                if is_served:
                    await self._admit(record, call)
                with self._readiness.admit(record.method):
                    await self._respond(handler, call, incoming)
            except LongleafError:
                if handler.request_streaming:
                    await incoming.discard_rest(call)
                raise

    async def _admit(self, record: CallRecord, call: StreamCall) -> None:
        """Authenticates and authorizes a call to the model, before anything else is looked up. Raises Unauthenticated
        and PermissionDenied."""
        try:
            caller = self._authenticator.authenticate(dict(call.invocation_metadata()), certified_names(call))
        except Unauthenticated:
            if seconds := self._refusals.record_failure():
                with self._refusals.waiting():
                    await asyncio.sleep(seconds)
            raise
        record.tenant = caller.tenant
        CALLER.set(caller)
        check_role(record.method, caller)

    async def _respond(self, handler: Handler, call: StreamCall, incoming: RequestReader) -> None:
        if not handler.response_streaming:
            await call.write(await handler.unary_unary(await incoming.read_one(call), call))
        elif handler.request_streaming:
            await self._send(handler.stream_stream(incoming.read_all(call), call), call, incoming)
        else:
            await self._send(handler.unary_stream(await incoming.read_one(call), call), call, incoming)

    async def _send(self, responses: Any, call: StreamCall, incoming: RequestReader) -> None:
        """Writes responses instead of yielding them, so that a cancellation of the call arrives here and `responses`
        are closed immediately.

        They are closed as well when a write takes longer than `unread_timeout`. gRPC cannot end a call whose client
        does not read: the call waits until the client reads again, and gets ResourceExhausted, or disconnects.
        """
        closing: list[asyncio.Task[None]] = []

        def release() -> None:
            incoming.release()
            closing.append(asyncio.create_task(responses.aclose()))

        async with aclosing(responses):
            try:
                async for response in responses:
                    timer = asyncio.get_running_loop().call_later(self._unread_timeout, release)
                    try:
                        await call.write(response)
                    finally:
                        timer.cancel()
                    if closing:
                        raise ResourceExhausted("stream", f"not read for {human_seconds(self._unread_timeout)}")
                    incoming.release()  # the handler has copied from the request all that it needs
            finally:
                await asyncio.gather(*closing)


async def _answer(record: CallRecord, work: Awaitable[None], call: StreamCall) -> None:
    """Runs the call; an error ends it with a status. The error is released before the status is sent."""
    try:
        await work
        record.code = grpc.StatusCode.OK.name
        return
    except asyncio.CancelledError:
        record.code = grpc.StatusCode.CANCELLED.name
        raise
    except LongleafError as error:
        redacted = redact_error(error)
        is_hidden = str(redacted) != str(error)  # details withheld from the caller are logged for the operator
        if is_hidden or (isinstance(error, Unavailable) and error.retry_seconds is None):  # others may quote the client
            logger.warning("%s: %s", record.method, error)
        record.error = type(error).__name__
        record.field = error.field if isinstance(error, InvalidArgument) else ""
        refusal = _refusal(unscope_error(redacted, record.tenant))
        _forget(error)
    except grpc.aio.AbortError as error:  # the library's own services abort calls directly
        _forget(error)
        return
    except grpc.aio.InternalError as error:  # nothing can be sent: the client disconnected
        record.code = grpc.StatusCode.CANCELLED.name
        raise asyncio.CancelledError from error
    except Exception as error:
        logger.exception("%s failed", record.method)
        record.error = type(error).__name__
        refusal = (grpc.StatusCode.INTERNAL, f"{type(error).__name__}; see the log of the server")
        _forget(error)
    record.code, record.message = refusal[0].name, refusal[1]
    try:
        await call.abort(*refusal)
    except grpc.aio.AbortError as error:
        _forget(error)
    except grpc.aio.InternalError:  # the client disconnected
        return


def _refusal(error: LongleafError) -> Refusal:
    status = encode_error(error)
    return grpc_code(status), status.message, ((DETAILS_KEY, status.SerializeToString()),)


def _forget(error: BaseException | None) -> None:
    """Releases the frames of an error and its causes. gRPC keeps an AbortError with its call, and streams keep the
    error that ended them. Their frames refer to the call and the stream, and would keep the request in memory until the
    next garbage collection."""
    while error is not None:
        cause, context = error.__cause__, error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        _forget(cause)
        error = context
