"""CORS: pages of other origins that may call the gateway and read its answers."""

from collections.abc import Iterable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
EXPOSED_HEADERS = ("retry-after", "x-should-retry", "upload-offset", "upload-complete", "longleaf-warning")
"""Response headers that pages of allowed origins may read, besides the content type and length."""
PREFLIGHT_SECONDS = 600
"""How long a browser may cache the answer to a preflight request."""


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application with CORS for pages of these origins; unchanged without any."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=["*"],  # the requested ones: OpenAI's clients send x-stainless-… headers
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_SECONDS,
        allow_private_network=True,
    )


def early_headers(origins: Sequence[str], request_headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of an answer that is sent before the application sees the request, of which some headers may be
    missing. If the Origin is one of them, a page may read the answer if only one origin is allowed."""
    given = {value.decode("latin-1") for name, value in request_headers if name.lower() == b"origin"} or set(origins)
    if len(given) != 1 or not given.issubset(origins):
        return {}
    return {
        "access-control-allow-origin": given.pop(),
        "access-control-expose-headers": ", ".join(EXPOSED_HEADERS),
        "vary": "Origin",
    }
