"""Conversion of typed errors to gRPC statuses with google.rpc details, and back, by the table KINDS.

Errors that share a code are distinguished by their reason. A status with an unknown reason becomes a LongleafError that
names the code.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc import StatusCode

from longleaf.codec.times import decode_seconds, encode_duration
from longleaf.errors import (
    AlreadyExists,
    Cancelled,
    CatalogError,
    CheckpointChanged,
    ContextLost,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    GroupFailed,
    InvalidArgument,
    LongleafError,
    ModelRefused,
    NotFinite,
    NotFound,
    PermissionDenied,
    RankLost,
    ResourceExhausted,
    StartError,
    StorageUnavailable,
    Unauthenticated,
    Unavailable,
)

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "longleaf"
BROKEN_SEND = "Internal error from Core"
"""gRPC's own message for a call that ended while a request was being sent."""
TOO_LARGE = re.compile(r"(?:CLIENT: Sent|SERVER: Received) message larger than max \((\d+) vs\. (\d+)\)")
"""gRPC's message, on either side, for a request that exceeds the message size limit."""
NO_CONNECTION = "failed to connect to all addresses"
UNTRUSTED = "has a certificate that is not signed by an authority in --tls-ca or LONGLEAF_TLS_CA"
MISTAKES = (
    (
        "WRONG_VERSION_NUMBER",
        "serves plain connections; those with an authority, here or in LONGLEAF_TLS_CA, are not",
    ),
    ("Hostname Verification", "has a certificate for another name"),
    ("CERTIFICATE_VERIFY_FAILED", UNTRUSTED),
    ("certificate signature failure", UNTRUSTED),
)
"""Patterns in gRPC's message for a failed TLS handshake, and the cause, in order of matching. Retrying does not help.
"""
CUT_OFF = ("Socket closed", "Connection reset")
"""Patterns for a connection that the service closed before any data was exchanged."""
RANK = re.compile(r"[0-9]{1,9}")
MAX_TEXT_BYTES = 800
"""Maximum UTF-8 length of a message, name or description. A status is sent in headers, which clients limit to 8 KiB by
default. They contain the message percent-encoded (up to three bytes per byte), and again in base64 with the details."""

Detail = TypeVar("Detail", bound=Message)
Read = Callable[[status_pb2.Status], LongleafError | None]


@dataclass(frozen=True)
class ErrorKind:
    """Conversion of one error type."""

    error: type[LongleafError]
    code: StatusCode
    details: Callable[[Any], list[Message]]
    """Returns the details of the status for an error."""
    read: Read
    """Returns the error for a status with this code; None if the status is of another kind."""


def encode_error(error: LongleafError) -> status_pb2.Status:
    """The status for `error`, with its details."""
    kind = next((kind for kind in KINDS if isinstance(error, kind.error)), None)
    code = StatusCode.UNKNOWN if kind is None else kind.code
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=_short(str(error)))
    for detail in kind.details(error) if kind is not None else ():
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def grpc_code(status: status_pb2.Status) -> StatusCode:
    """gRPC's enum value of the code in `status`."""
    return StatusCode[code_pb2.Code.Name(status.code)]


def decode_error(error: grpc.RpcError, server: str) -> LongleafError:
    """The typed error for `error`, which a call to `server` raised."""
    status = _status_of(error)
    code, found = grpc_code(status), _of_library(status, server)
    of_code = (kind for kind in KINDS if kind.code == code)
    found = found or next((read for kind in of_code if (read := kind.read(status)) is not None), None)
    return found or LongleafError(status.message if code == StatusCode.UNKNOWN else f"{code.name}: {status.message}")


def _status_of(error: grpc.RpcError) -> status_pb2.Status:
    """The status in the call's trailers, or one made from the code and message."""
    trailers = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):  # from another server, or truncated: use the code only
                status = status_pb2.Status.FromString(value)
                if status.code in code_pb2.Code.values() and status.code != code_pb2.OK:
                    return status
    return status_pb2.Status(code=code_pb2.Code.Value(error.code().name), message=error.details() or "")


def _of_library(status: status_pb2.Status, server: str) -> LongleafError | None:
    """The error for a status that gRPC itself generated; None for one from the service."""
    is_reported = _find(status, error_details_pb2.ErrorInfo) is not None
    match grpc_code(status):
        case StatusCode.RESOURCE_EXHAUSTED if sizes := TOO_LARGE.search(status.message):
            message = f"has {int(sizes[1]):,} bytes; the limit for one message is {int(sizes[2]):,}"
            return InvalidArgument("request", message)
        case StatusCode.UNAVAILABLE if not is_reported:
            return _of_connection(status.message, server)
        case StatusCode.DEADLINE_EXCEEDED if not is_reported:
            return DeadlineExceeded(f"{server} did not answer in time")
        case StatusCode.CANCELLED:  # not cancelled by this client, which would raise CancelledError
            return Unavailable(f"{server} ended the call")
        case StatusCode.INTERNAL if status.message == BROKEN_SEND:
            return Unavailable(f"the connection to {server} broke while the request was being sent")
        case StatusCode.UNIMPLEMENTED:
            return LongleafError(f"{server} does not implement this call of longleaf.v1: {status.message}")
        case _:
            return None


def _of_connection(message: str, server: str) -> LongleafError:
    """Readable description of a connection failure, instead of gRPC's internal wording."""
    if message.startswith(NO_CONNECTION):
        for sign, explanation in MISTAKES:
            if sign in message:
                return InvalidArgument("tls_ca", f"{server} {explanation} ({message})")
    return Unavailable(f"the server at {server} does not answer ({message})")


def is_cut_off(error: LongleafError) -> bool:
    """Whether the service closed a connection before any data was exchanged."""
    message = str(error)
    return isinstance(error, Unavailable) and NO_CONNECTION in message and any(sign in message for sign in CUT_OFF)


def _find(status: status_pb2.Status, kind: type[Detail]) -> Detail | None:
    for packed in status.details:
        detail = kind()
        with suppress(DecodeError):
            if packed.Unpack(detail):
                return detail
    return None


def _short(text: str) -> str:
    content = text.encode(errors="replace")
    if len(content) <= MAX_TEXT_BYTES:
        return content.decode()
    return content[: MAX_TEXT_BYTES - len("…".encode())].decode(errors="ignore") + "…"


# --- details of a status, and their decoding ---


def _info(reason: str, *names: str) -> Callable[[LongleafError], list[Message]]:
    """An ErrorInfo with `reason` and these attributes of the error."""

    def details(error: LongleafError) -> list[Message]:
        facts = {name: _short(str(getattr(error, name))) for name in names}
        return [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=facts)]

    return details


def _info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo of a status; an empty one if there is none."""
    return _find(status, error_details_pb2.ErrorInfo) or error_details_pb2.ErrorInfo()


def _of_reason(error: type[LongleafError], reason: str) -> Read:
    return lambda status: error(status.message) if _info_of(status).reason == reason else None


def _of_message(error: type[LongleafError]) -> Read:
    return lambda status: error(status.message)


def _worker_lost(status: status_pb2.Status) -> RankLost | None:
    info = _info_of(status)
    is_one = info.reason == "WORKER_LOST" and RANK.fullmatch(info.metadata["rank"])
    return RankLost(int(info.metadata["rank"]), info.metadata["reason"]) if is_one else None


def _not_finite(status: status_pb2.Status) -> NotFinite | None:
    tokens = _info_of(status).metadata["tokens"]
    return NotFinite(tokens) if tokens else None


def _context_lost(status: status_pb2.Status) -> ContextLost | None:
    info = _info_of(status)
    return ContextLost(info.metadata["name"], info.metadata["reason"]) if info.reason == "CONTEXT_LOST" else None


def _data_loss(status: status_pb2.Status) -> DataLoss | None:
    info = _info_of(status)
    return DataLoss(info.metadata["name"], info.metadata["reason"]) if info.reason == "DATA_LOSS" else None


def _checkpoint_changed(status: status_pb2.Status) -> CheckpointChanged | None:
    info = _info_of(status)
    is_one = info.reason == "CHECKPOINT_CHANGED"
    return CheckpointChanged(info.metadata["name"], info.metadata["changes"]) if is_one else None


def _failed_precondition(status: status_pb2.Status) -> FailedPrecondition | None:
    info = _info_of(status)
    if info.reason != "FAILED_PRECONDITION":
        return None
    return FailedPrecondition(info.metadata["subject"], info.metadata["description"])


def _storage_unavailable(error: StorageUnavailable) -> list[Message]:
    """Details of the error, with RetryInfo if waiting helps."""
    return [*_info("STORAGE_UNAVAILABLE")(error), *_retry_info(error.retry_seconds)]


def _read_storage_unavailable(status: status_pb2.Status) -> StorageUnavailable | None:
    is_one = _info_of(status).reason == "STORAGE_UNAVAILABLE"
    return StorageUnavailable(status.message, _retry_seconds(status)) if is_one else None


def _unavailable(error: Unavailable) -> list[Message]:
    """Details of the error, with RetryInfo if waiting helps."""
    return [*_info("UNAVAILABLE")(error), *_retry_info(error.retry_seconds)]


def _retry_info(seconds: float | None) -> list[Message]:
    return [] if seconds is None else [error_details_pb2.RetryInfo(retry_delay=encode_duration(seconds))]


def _retry_seconds(status: status_pb2.Status) -> float | None:
    retry = _find(status, error_details_pb2.RetryInfo)
    return max(0.0, decode_seconds(retry.retry_delay)) if retry else None


def _violation(error: InvalidArgument) -> list[Message]:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=_short(error.field), description=_short(error.description)
    )
    return [error_details_pb2.BadRequest(field_violations=[violation])]


def _invalid_argument(status: status_pb2.Status) -> InvalidArgument:
    bad = _find(status, error_details_pb2.BadRequest)
    if bad is None or not bad.field_violations:
        return InvalidArgument("request", status.message)
    return InvalidArgument(bad.field_violations[0].field, bad.field_violations[0].description)


def _resource(error: NotFound | AlreadyExists) -> list[Message]:
    return [
        error_details_pb2.ResourceInfo(
            resource_type=_short(error.name.partition("/")[0]),
            resource_name=_short(error.name),
            description=_short(str(error)),
        )
    ]


def _of_resource(error: type[NotFound | AlreadyExists]) -> Read:
    def read(status: status_pb2.Status) -> NotFound | AlreadyExists | None:
        info = _find(status, error_details_pb2.ResourceInfo)
        return error(info.resource_name) if info else None

    return read


def _quota(error: ResourceExhausted) -> list[Message]:
    """Details of the error, with RetryInfo if waiting helps."""
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_short(error.subject), description=_short(error.description)
    )
    return [error_details_pb2.QuotaFailure(violations=[violation]), *_retry_info(error.retry_seconds)]


def _exhausted(status: status_pb2.Status) -> ResourceExhausted:
    quota = _find(status, error_details_pb2.QuotaFailure)
    seconds = _retry_seconds(status)
    if quota is None or not quota.violations:
        return ResourceExhausted("message", status.message, seconds)
    return ResourceExhausted(quota.violations[0].subject, quota.violations[0].description, seconds)


KINDS = (
    ErrorKind(InvalidArgument, StatusCode.INVALID_ARGUMENT, _violation, _invalid_argument),
    ErrorKind(NotFound, StatusCode.NOT_FOUND, _resource, _of_resource(NotFound)),
    ErrorKind(AlreadyExists, StatusCode.ALREADY_EXISTS, _resource, _of_resource(AlreadyExists)),
    ErrorKind(ResourceExhausted, StatusCode.RESOURCE_EXHAUSTED, _quota, _exhausted),
    ErrorKind(
        DeadlineExceeded, StatusCode.DEADLINE_EXCEEDED, _info("DEADLINE_EXCEEDED"), _of_message(DeadlineExceeded)
    ),
    # not CANCELLED, which gRPC treats as cancelled by the caller
    ErrorKind(Cancelled, StatusCode.ABORTED, _info("CANCELLED"), _of_reason(Cancelled, "CANCELLED")),
    ErrorKind(
        PermissionDenied, StatusCode.PERMISSION_DENIED, _info("PERMISSION_DENIED"), _of_message(PermissionDenied)
    ),
    ErrorKind(Unauthenticated, StatusCode.UNAUTHENTICATED, _info("UNAUTHENTICATED"), _of_message(Unauthenticated)),
    ErrorKind(NotFinite, StatusCode.DATA_LOSS, _info("NOT_FINITE", "tokens"), _not_finite),
    ErrorKind(ContextLost, StatusCode.DATA_LOSS, _info("CONTEXT_LOST", "name", "reason"), _context_lost),
    ErrorKind(DataLoss, StatusCode.DATA_LOSS, _info("DATA_LOSS", "name", "reason"), _data_loss),
    ErrorKind(
        CheckpointChanged,
        StatusCode.FAILED_PRECONDITION,
        _info("CHECKPOINT_CHANGED", "name", "changes"),
        _checkpoint_changed,
    ),
    ErrorKind(
        FailedPrecondition,
        StatusCode.FAILED_PRECONDITION,
        _info("FAILED_PRECONDITION", "subject", "description"),
        _failed_precondition,
    ),
    ErrorKind(RankLost, StatusCode.UNAVAILABLE, _info("WORKER_LOST", "rank", "reason"), _worker_lost),
    ErrorKind(GroupFailed, StatusCode.UNAVAILABLE, _info("EPOCH_BROKEN"), _of_reason(GroupFailed, "EPOCH_BROKEN")),
    ErrorKind(StorageUnavailable, StatusCode.UNAVAILABLE, _storage_unavailable, _read_storage_unavailable),
    ErrorKind(
        Unavailable,
        StatusCode.UNAVAILABLE,
        _unavailable,
        lambda status: Unavailable(status.message, _retry_seconds(status)),
    ),
    ErrorKind(
        ModelRefused, StatusCode.FAILED_PRECONDITION, _info("MODEL_REFUSED"), _of_reason(ModelRefused, "MODEL_REFUSED")
    ),
    ErrorKind(
        CatalogError, StatusCode.FAILED_PRECONDITION, _info("CATALOG_ERROR"), _of_reason(CatalogError, "CATALOG_ERROR")
    ),
    ErrorKind(StartError, StatusCode.FAILED_PRECONDITION, _info("START_ERROR"), _of_reason(StartError, "START_ERROR")),
)
"""Kinds with the same code are tried in this order, subclasses before their base classes. A LongleafError without a
kind is UNKNOWN, without details."""
