"""Peer information from the metadata of a call."""

from collections.abc import Iterable, Mapping

from coordinator.grpc_server.request_limiter import StreamCall

SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
BINARY = "-bin"


def plain_headers(call: StreamCall) -> Mapping[str, str]:
    """The text headers of a call, without binary headers and credentials."""
    found = ((key, value) for key, value in call.invocation_metadata() if isinstance(value, str))
    return {key: value for key, value in found if key not in SECRET_HEADERS and not key.endswith(BINARY)}


def certified_names(call: StreamCall) -> Iterable[str]:
    """URI and DNS names in the client's certificate, if it sent one, in the notation of the credentials file. Other
    kinds of names, such as e-mail addresses, are ignored: an authority may let clients choose a value that looks like
    the name of another client."""
    known = call.auth_context()
    kinds = (("uri:", "peer_uri"), ("dns:", "peer_dns"))
    return [kind + name.decode(errors="replace") for kind, key in kinds for name in known.get(key, ())]
