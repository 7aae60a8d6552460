"""What a connection says of who is at its other end."""

from collections.abc import Iterable, Mapping

from coordinator.serving.gate import StreamCall

SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
BINARY = "-bin"


def plain_headers(call: StreamCall) -> Mapping[str, str]:
    """The headers of a call that anybody may read."""
    found = ((key, value) for key, value in call.invocation_metadata() if isinstance(value, str))
    return {key: value for key, value in found if key not in SECRET_HEADERS and not key.endswith(BINARY)}


def certified_names(call: StreamCall) -> Iterable[str]:
    """URI and DNS names in the certificate that the client has shown, if it has."""
    return [value.decode(errors="replace") for value in call.auth_context().get("x509_subject_alternative_name", ())]
