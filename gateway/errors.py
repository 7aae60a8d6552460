"""HTTP errors: statuses, and bodies in OpenAI's format."""

import logging
import math
import re
from collections.abc import Callable, Mapping

import msgspec

from longleaf.errors import (
    AlreadyExists,
    Cancelled,
    CheckpointChanged,
    ContextLost,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LongleafError,
    NotFinite,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StartError,
    Unauthenticated,
    Unavailable,
)

INVALID = "invalid_request_error"
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors by status; others are INVALID below 500, and `api_error` from there on."""
RETRY_SECONDS = 1.0
"""Default retry delay, if the service specifies none."""
SOON = {"retry-after": "1"}


MAY_PASS = frozenset({404, 408, 499})
"""Statuses of requests that may succeed when repeated unchanged, after an unknown time: a context may still be
ingested, and a caller may send faster. Other 4xx responses mean that a client must not retry, unless they have a
retry-after header."""


UNSUPPORTED_THREAD = "thread_unsupported_request"
"""Code of an error on which Anthropic's clients repeat a request without a conversation held by the server."""


class HttpProblem(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})
        if 400 <= status < 500 and status not in MAY_PASS and "retry-after" not in self.headers:
            self.headers["x-should-retry"] = "false"

    @property
    def body(self) -> dict[str, object]:
        """The error object of the body."""
        facts = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": facts}

    @property
    def anthropic_body(self) -> dict[str, object]:
        """The body in Anthropic's format."""
        kind = ANTHROPIC_KINDS.get(self.status, INVALID if self.status < 500 else "api_error")
        found: dict[str, object] = {"type": kind, "message": self.message}
        if self.code == UNSUPPORTED_THREAD:
            found["details"] = {"error_code": self.code}
        return {"type": "error", "error": found}

    def encoded(self, path: str = "") -> bytes:
        """The body of the error in the format of the API that has this path."""
        is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
        return msgspec.json.encode(self.anthropic_body if is_anthropic else self.body)


def renamed(problem: HttpProblem, rename: Callable[[str], str]) -> HttpProblem:
    """The same error with another name of the field, also at the beginning of its message."""
    if problem.param is None:
        return problem
    param = rename(problem.param)
    message = problem.message
    if message.startswith(problem.param):
        message = param + message.removeprefix(problem.param)
    return HttpProblem(
        problem.status, message, kind=problem.kind, param=param, code=problem.code, headers=problem.headers
    )


def unsupported(param: str, reason: str) -> HttpProblem:
    """The error for a value of a field that this gateway does not support."""
    return HttpProblem(400, f"{param}: {reason}", param=param, code="unsupported_value")


def unavailable(message: str) -> HttpProblem:
    """A temporary failure with a retry delay."""
    return HttpProblem(503, message, kind="server_error", code="unavailable", headers=SOON)


def busy(load: str) -> HttpProblem:
    """The error if the gateway itself has no room now, in contrast to the service; `load` describes its use of it."""
    return HttpProblem(503, f"the gateway is busy: {load}", kind="server_error", code="gateway_busy", headers=SOON)


def stopping() -> HttpProblem:
    """The error for answers that the shutdown of the gateway interrupts."""
    return unavailable("the gateway is stopping")


class _Row(msgspec.Struct, frozen=True):
    error: type[LongleafError]
    status: int
    kind: str
    code: str | None = None


TABLE = (
    _Row(InvalidArgument, 400, INVALID),
    _Row(Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    _Row(PermissionDenied, 403, "permission_error"),
    _Row(NotFound, 404, INVALID, "not_found"),
    _Row(AlreadyExists, 409, INVALID, "already_exists"),
    _Row(Cancelled, 409, INVALID, "cancelled"),
    _Row(CheckpointChanged, 409, INVALID, "checkpoint_changed"),
    _Row(FailedPrecondition, 409, INVALID, "failed_precondition"),
    _Row(StartError, 409, INVALID, "failed_precondition"),
    _Row(ContextLost, 410, INVALID, "context_lost"),
    _Row(DataLoss, 410, INVALID, "data_loss"),
    _Row(NotFinite, 410, INVALID, "not_finite"),
    _Row(ResourceExhausted, 429, "rate_limit_error", "rate_limit_exceeded"),
    _Row(DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    _Row(Unavailable, 503, "server_error", "unavailable"),
    _Row(LongleafError, 502, "server_error", "bad_gateway"),
)
"""HTTP form of each error. Subclasses come before their base classes."""
FIELDS = {
    "sampling.max_token_count": "max_tokens",
    "sampling.stop_token_ids": "stop",
    "sampling.logprob_count": "top_logprobs",
    "sample_count": "n",
    "client_id": "user",
    "conversation.messages": "messages",
    "input": "messages",
    "conversation": "messages",
    "prefaced_config.system": "system",
    "config.name": "id",
    "context.name": "id",
    "config.expire_time": "expires",
    "context.expire_time": "expires",
    "config.capacity_token_count": "capacity",
    "config.total_size_bytes": "Upload-Length",
    "token_count": "tokens",
}
"""HTTP names of the service's fields, where they differ."""
_GIVE = "send Authorization: Bearer CREDENTIAL (api_key in OpenAI clients)"
_UNREACHED = re.compile(r"the server at (the service does not answer) \(.*", re.DOTALL)
"""The rest of the message contains addresses, which only operators may see."""
AWAY = "the service cannot be reached: %s"
log = logging.getLogger("gateway")
_CONTENT = re.compile(r"^(messages\[\d+\])\.(?:text|parts)$")
_PARENT = re.compile(r"^(?:sampling|conversation|config|context|prefaced_config)\.")


def problem_of(error: LongleafError, names: Mapping[str, str] | None = None, missing: str = "not_found") -> HttpProblem:
    """The HTTP error for an error of the service. `names` maps fields and takes precedence over FIELDS; `missing` is
    the code for a resource that does not exist."""
    row = next(row for row in TABLE if isinstance(error, row.error))
    if isinstance(error, InvalidArgument) and error.field == "tls_ca":  # the gateway's own configuration is wrong
        log.warning(AWAY, error)
        return unavailable("the service cannot be reached")
    if isinstance(error, InvalidArgument):
        param = _param(error.field, {**FIELDS, **(names or {})})
        return HttpProblem(400, f"{param}: {error.description}", param=param, code="invalid_value")
    is_missing = row.error is NotFound
    code, param = (missing, (names or {}).get("context")) if is_missing else (row.code, None)
    headers = dict[str, str]()
    if isinstance(error, ResourceExhausted | Unavailable):
        seconds = error.retry_seconds
        if seconds is None and isinstance(error, ResourceExhausted):
            code = "insufficient_quota"
        else:
            headers["retry-after"] = str(max(1, math.ceil(seconds or RETRY_SECONDS)))
    if isinstance(error, AlreadyExists) and error.name.startswith("generations/"):
        headers |= SOON  # the request_id becomes free when the other answer ends
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return HttpProblem(row.status, _message_of(error), kind=row.kind, param=param, code=code, headers=headers)


def _message_of(error: LongleafError) -> str:
    """The message without details that callers must not see."""
    if isinstance(error, Unauthenticated):  # the service's message names options of the command line
        return f"{str(error).partition(':')[0]}: {_GIVE}"
    if _UNREACHED.match(str(error)):
        log.warning(AWAY, error)
    return _UNREACHED.sub(r"\1", str(error))


def _param(field: str, names: Mapping[str, str]) -> str:
    whole = field.partition(".ids[")[0]  # index in a list of ids
    return names.get(whole) or _CONTENT.sub(r"\1.content", _PARENT.sub("", whole))
