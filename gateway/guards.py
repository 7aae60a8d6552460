"""Middleware for all requests: origin checks, security headers and access logs."""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import HttpProblem, stopping

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of sec-fetch-site for requests of the gateway's own page, and for a typed address. Another port of the same
host is `same-site`."""
log = logging.getLogger("gateway.access")
failures = logging.getLogger("gateway")


class OriginGuardMiddleware:
    """Refuses cross-origin requests of browsers, adds security headers to every response, and logs every call."""

    def __init__(
        self,
        app: ASGIApp,
        allowed: Iterable[str] = (),
        public_url: str | None = None,
        allowed_origins: Iterable[str] = (),
    ) -> None:
        public = urlsplit(public_url) if public_url else None
        self._app = app
        self._origin = f"{public.scheme}://{public.netloc}".lower() if public else None
        names = {*allowed, *([public.hostname] if public and public.hostname else [])}
        self._allowed_origins = frozenset(allowed_origins)
        self._names = {name.lower() for name in names} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": _with_guards(message["headers"])}
            await send(message)

        try:
            if (problem := self._refused(scope)) is not None:
                await answer(problem, guarded, scope["path"])
            else:
                await self._app(scope, receive, guarded)
        except asyncio.CancelledError:  # the gateway stops
            if status != 0:
                raise
            await answer(stopping(), guarded, scope["path"])
        except Exception as error:
            failures.error("%s failed", scope["method"], exc_info=error, extra={"method": scope["method"]})
            if status == 0:  # otherwise the connection is closed, because the answer is incomplete
                problem = HttpProblem(500, "internal error of the gateway; see its log", kind="server_error")
                await answer(problem, guarded, scope["path"])
        finally:
            self._log(scope, status, time.monotonic() - began)

    def _refused(self, scope: Scope) -> HttpProblem | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            return HttpProblem(400, "send one Host header")
        host = hosts[0].lower() if hosts else "localhost"
        if not self._is_ours(host):
            message = "is not an address of this gateway; --allow-host accepts further names"
            return HttpProblem(421, f"Host: {host[:100]} {message}", code="misdirected")
        origins = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"origin"]
        if origins and self._allowed_origins.issuperset(origins):
            return None
        own = (f"{scope['scheme']}://{host}", self._origin)
        if any(origin not in own for origin in origins):
            message = "pages of other origins may not use this gateway (--allow-origin allows one)"
            return HttpProblem(403, message, kind="permission_error", code="origin")
        sites = {value for name, value in scope["headers"] if name == b"sec-fetch-site"}
        if scope["path"].startswith("/v1/") and not sites <= OWN_SITES:
            return HttpProblem(403, "other sites may not call this gateway", kind="permission_error", code="origin")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope.get("client")
        route = getattr(scope.get("route"), "path", "-")
        extra = {"method": f"{scope['method']} {route}", "code": str(status), "seconds": round(seconds, 3)}
        log.info("call", extra=extra | ({"host": client[0]} if client else {}))


def _with_guards(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    found = [*headers, *HEADERS]
    if not any(name.lower() == b"cache-control" for name, _ in found):
        found.append((b"cache-control", b"no-store"))
    return found


async def answer(problem: HttpProblem, send: Send, path: str = "") -> None:
    """Sends an error as a complete response, in the format of the API at `path`."""
    content = problem.encoded(path)
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in problem.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
