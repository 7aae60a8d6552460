"""Typed errors to gRPC statuses with google.rpc details, and back.

InvalidArgument    INVALID_ARGUMENT     BadRequest
NotFound           NOT_FOUND            ResourceInfo
AlreadyExists      ALREADY_EXISTS       ResourceInfo
ResourceExhausted  RESOURCE_EXHAUSTED   QuotaFailure, RetryInfo when waiting helps
DeadlineExceeded   DEADLINE_EXCEEDED    ErrorInfo DEADLINE_EXCEEDED
Cancelled          ABORTED              ErrorInfo CANCELLED
NotFinite          DATA_LOSS            ErrorInfo NOT_FINITE with the tokens
WorkerLost         UNAVAILABLE          ErrorInfo WORKER_LOST with the rank
Unavailable        UNAVAILABLE          ErrorInfo UNAVAILABLE
StartError         FAILED_PRECONDITION  ErrorInfo START_ERROR or MODEL_REFUSED

Where only a reason tells errors of one code apart, one that is unknown becomes a LongleafError that names the code.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from longleaf.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    ModelRefused,
    NotFinite,
    NotFound,
    ResourceExhausted,
    StartError,
    Unavailable,
    WorkerLost,
)

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "longleaf"
BROKEN_SEND = "Internal error from Core"
"""What the library itself, not the server, says of a call that ended while it was being sent to."""
TOO_LARGE = re.compile(r"(?:CLIENT: Sent|SERVER: Received) message larger than max \((\d+) vs\. (\d+)\)")
"""What the library says on either side of a request that is larger than a message may be."""
RANK = re.compile(r"[0-9]{1,9}")
MAX_TEXT = 1000
"""Characters of a message or description; statuses travel in headers, whose size is limited (8 KiB by default)."""

Detail = TypeVar("Detail", bound=Message)


def encode_error(error: LongleafError) -> status_pb2.Status:
    """The status that carries `error`, with its details."""
    code, details = _encode(error)
    status = status_pb2.Status(code=code, message=_short(str(error)))
    for detail in details:
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _short(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _encode(error: LongleafError) -> tuple[int, list[Message]]:
    match error:
        case InvalidArgument():
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=_short(error.field), description=_short(error.description)
            )
            return code_pb2.INVALID_ARGUMENT, [error_details_pb2.BadRequest(field_violations=[violation])]
        case NotFound():
            return code_pb2.NOT_FOUND, [_resource(error.name, str(error))]
        case AlreadyExists():
            return code_pb2.ALREADY_EXISTS, [_resource(error.name, str(error))]
        case ResourceExhausted():
            return code_pb2.RESOURCE_EXHAUSTED, _quota(error)
        case DeadlineExceeded():
            return code_pb2.DEADLINE_EXCEEDED, [_info("DEADLINE_EXCEEDED", {})]
        case Cancelled():  # not CANCELLED: the library takes that for the caller's own doing
            return code_pb2.ABORTED, [_info("CANCELLED", {})]
        case NotFinite():
            return code_pb2.DATA_LOSS, [_info("NOT_FINITE", {"tokens": error.tokens})]
        case WorkerLost():
            facts = {"rank": str(error.rank), "reason": error.reason}
            return code_pb2.UNAVAILABLE, [_info("WORKER_LOST", facts)]
        case Unavailable():
            return code_pb2.UNAVAILABLE, [_info("UNAVAILABLE", {})]
        case ModelRefused():
            return code_pb2.FAILED_PRECONDITION, [_info("MODEL_REFUSED", {})]
        case StartError():
            return code_pb2.FAILED_PRECONDITION, [_info("START_ERROR", {})]
        case _:
            return code_pb2.UNKNOWN, []


def _resource(name: str, description: str) -> error_details_pb2.ResourceInfo:
    kind = name.partition("/")[0]
    return error_details_pb2.ResourceInfo(
        resource_type=kind, resource_name=_short(name), description=_short(description)
    )


def _quota(error: ResourceExhausted) -> list[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_short(error.subject), description=_short(error.description)
    )
    details: list[Message] = [error_details_pb2.QuotaFailure(violations=[violation])]
    if error.retry_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_seconds))
        details.append(retry)
    return details


def _info(reason: str, metadata: dict[str, str]) -> error_details_pb2.ErrorInfo:
    clipped = {key: _short(value) for key, value in metadata.items()}
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=clipped)


def grpc_code(status: status_pb2.Status) -> grpc.StatusCode:
    """gRPC's own name of the code in `status`."""
    return grpc.StatusCode[code_pb2.Code.Name(status.code)]


def decode_error(error: grpc.RpcError, server: str) -> LongleafError:
    """The typed error that `error`, raised by a call to `server`, stands for."""
    status = _status_of(error)
    code, message = grpc_code(status), status.message
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return _decode_invalid(status)
        case grpc.StatusCode.NOT_FOUND if info := _find(status, error_details_pb2.ResourceInfo):
            return NotFound(info.resource_name)
        case grpc.StatusCode.ALREADY_EXISTS if info := _find(status, error_details_pb2.ResourceInfo):
            return AlreadyExists(info.resource_name)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if found := TOO_LARGE.search(message):
            return InvalidArgument(
                "request", f"has {int(found[1]):,} bytes, at most {int(found[2]):,} fit in one message"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _decode_exhausted(status)
        case grpc.StatusCode.UNAVAILABLE:
            return _decode_unavailable(status, server)
        case grpc.StatusCode.FAILED_PRECONDITION if _reason(status) == "MODEL_REFUSED":
            return ModelRefused(message)
        case grpc.StatusCode.FAILED_PRECONDITION if _reason(status) == "START_ERROR":
            return StartError(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            is_told = _find(status, error_details_pb2.ErrorInfo) is not None
            return DeadlineExceeded(message if is_told else f"{server} did not answer in time")
        case grpc.StatusCode.ABORTED if _reason(status) == "CANCELLED":
            return Cancelled(message)
        case grpc.StatusCode.DATA_LOSS if (info := _find(status, error_details_pb2.ErrorInfo)) and info.metadata[
            "tokens"
        ]:
            return NotFinite(info.metadata["tokens"])
        case grpc.StatusCode.CANCELLED:  # not by us: that would be a CancelledError
            return Unavailable(f"{server} ended the call")
        case grpc.StatusCode.INTERNAL if message == BROKEN_SEND:
            return Unavailable(f"the connection to {server} broke while it was being sent to")
        case grpc.StatusCode.UNIMPLEMENTED:
            return LongleafError(f"{server} does not serve this call of longleaf.v1: {message}")
        case grpc.StatusCode.UNKNOWN:
            return LongleafError(message)
        case _:
            return LongleafError(f"{code.name}: {message}")


def _status_of(error: grpc.RpcError) -> status_pb2.Status:
    """The status in the call's trailers, or one made of its bare code and message."""
    trailers = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):  # another server's, or cut on the way: the bare code says enough
                status = status_pb2.Status.FromString(value)
                if status.code in code_pb2.Code.values() and status.code != code_pb2.OK:
                    return status
    return status_pb2.Status(code=code_pb2.Code.Value(error.code().name), message=error.details() or "")


def _find(status: status_pb2.Status, kind: type[Detail]) -> Detail | None:
    for packed in status.details:
        detail = kind()
        with suppress(DecodeError):
            if packed.Unpack(detail):
                return detail
    return None


def _reason(status: status_pb2.Status) -> str:
    """Empty when none is told."""
    info = _find(status, error_details_pb2.ErrorInfo)
    return info.reason if info else ""


def _decode_invalid(status: status_pb2.Status) -> InvalidArgument:
    bad = _find(status, error_details_pb2.BadRequest)
    if bad is None or not bad.field_violations:
        return InvalidArgument("request", status.message)
    return InvalidArgument(bad.field_violations[0].field, bad.field_violations[0].description)


def _decode_exhausted(status: status_pb2.Status) -> ResourceExhausted:
    quota = _find(status, error_details_pb2.QuotaFailure)
    retry = _find(status, error_details_pb2.RetryInfo)
    seconds = max(0.0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9) if retry else None
    if quota is None or not quota.violations:
        return ResourceExhausted("message", status.message, seconds)
    return ResourceExhausted(quota.violations[0].subject, quota.violations[0].description, seconds)


def _decode_unavailable(status: status_pb2.Status, server: str) -> Unavailable:
    info = _find(status, error_details_pb2.ErrorInfo)
    if info is None:
        return Unavailable(f"the server at {server} does not answer ({status.message})")
    rank = info.metadata["rank"]
    if info.reason == "WORKER_LOST" and RANK.fullmatch(rank):
        return WorkerLost(int(rank), info.metadata["reason"])
    return Unavailable(status.message)
