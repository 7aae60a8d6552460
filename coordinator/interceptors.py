"""The one place where errors become statuses."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from longleaf.errors import InvalidArgument, LongleafError, Unavailable
from longleaf.status import DETAILS_KEY, encode_error, grpc_code

logger = logging.getLogger(__name__)

# The library types handlers loosely: requests, responses and the call pass through here unread.
Call = Any
Handler = Any


class Malformed:
    """Stands for a request that is not a valid message of its type."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
    """Answers every LongleafError of the methods of `package` with its status, and all else with INTERNAL."""

    def __init__(self, package: str = "/longleaf.v1.") -> None:
        self._package = package

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = _text(handler_call_details.method)
        if handler is None or not method.startswith(self._package):
            return handler
        if not handler.response_streaming:
            return _unary(method, handler)
        return _bidirectional(method, handler) if handler.request_streaming else _streaming(method, handler)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _unary(method: str, handler: Handler) -> Handler:
    async def answer(request: object, call: Call) -> object:
        async with _answered(method, call):
            return await handler.unary_unary(_checked(request), call)

    return grpc.unary_unary_rpc_method_handler(answer, _tolerant(handler), handler.response_serializer)


def _streaming(method: str, handler: Handler) -> Handler:
    async def answer(request: object, call: Call) -> None:
        async with _answered(method, call):
            await _send(handler.unary_stream(_checked(request), call), call)

    return grpc.unary_stream_rpc_method_handler(answer, _tolerant(handler), handler.response_serializer)


def _bidirectional(method: str, handler: Handler) -> Handler:
    async def answer(requests: AsyncIterator[object], call: Call) -> None:
        async with _answered(method, call):
            checked = (_checked(request) async for request in requests)
            await _send(handler.stream_stream(checked, call), call)

    return grpc.stream_stream_rpc_method_handler(answer, _tolerant(handler), handler.response_serializer)


async def _send(responses: Any, call: Call) -> None:
    """Writes instead of yielding: so a cancelled call is cancelled here, and `responses` are closed at once."""
    async with aclosing(responses):
        async for response in responses:
            await call.write(response)


def _tolerant(handler: Handler) -> Callable[[bytes], object]:
    """Lets requests that cannot be parsed come through: the library would answer INTERNAL."""

    def parse(data: bytes) -> object:
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            return Malformed(str(error))

    return parse


def _checked(request: object) -> object:
    if isinstance(request, Malformed):
        raise InvalidArgument("request", f"is not a valid message (strings must be UTF-8): {request.reason}")
    return request


@asynccontextmanager
async def _answered(method: str, call: Call) -> AsyncGenerator[None, None]:
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except LongleafError as error:
        logger.log(logging.WARNING if isinstance(error, Unavailable) else logging.INFO, "%s: %s", method, error)
        await _abort(error, call)
    except grpc.aio.InternalError as error:  # nothing can be sent: the client left
        raise asyncio.CancelledError from error
    except Exception as error:
        logger.exception("%s failed", method)
        await call.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}; the server's log tells more")


async def _abort(error: LongleafError, call: Call) -> NoReturn:
    status = encode_error(error)
    try:
        await call.abort(grpc_code(status), status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError as gone:  # the client left, so nobody is there to be told
        raise asyncio.CancelledError from gone
    raise AssertionError("abort raises")
