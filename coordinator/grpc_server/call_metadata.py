"""What a connection says of who is at its other end."""

from collections.abc import Iterable, Mapping

from coordinator.grpc_server.request_limiter import StreamCall

SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
BINARY = "-bin"


def plain_headers(call: StreamCall) -> Mapping[str, str]:
    """The headers of a call that anybody may read."""
    found = ((key, value) for key, value in call.invocation_metadata() if isinstance(value, str))
    return {key: value for key, value in found if key not in SECRET_HEADERS and not key.endswith(BINARY)}


def certified_names(call: StreamCall) -> Iterable[str]:
    """URI and DNS names in the certificate that the client has shown, if it has, as the file of credentials spells
    them. An authority lets people have others, such as addresses of e-mail, that may read alike."""
    known = call.auth_context()
    kinds = (("uri:", "peer_uri"), ("dns:", "peer_dns"))
    return [kind + name.decode(errors="replace") for kind, key in kinds for name in known.get(key, ())]
