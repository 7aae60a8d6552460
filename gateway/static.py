"""The web page and its files."""

import gzip
import hashlib
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import HttpProblem

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
}
"""Served file types and their content types."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Security policy of documents; it has no effect on other files."""
DOCUMENTS = (".html", ".svg")


async def page(request: Request) -> Response:
    """The page itself."""
    return _answer(request, FOLDER / "index.html")


async def file(request: Request) -> Response:
    """A file of the page."""
    return _answer(request, FOLDER / request.path_params["path"])


def _answer(request: Request, path: Path) -> Response:
    found = path
    try:
        found = path.resolve()
        is_served = found.is_relative_to(FOLDER.resolve()) and found.suffix in KINDS and found.is_file()
    except (OSError, ValueError):
        is_served = False
    if not is_served:
        raise HttpProblem(404, "there is no such file", code="not_found")
    content, packed, tag = _load(found, found.stat().st_mtime_ns)
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if found.suffix in DOCUMENTS:
        headers["content-security-policy"] = POLICY
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = packed, "gzip"
    return Response(content, media_type=KINDS[found.suffix], headers=headers)


@lru_cache(maxsize=128)
def _load(path: Path, changed: int) -> tuple[bytes, bytes, str]:
    """Contents of a file, compressed contents, and its ETag."""
    del changed
    content = path.read_bytes()
    return content, gzip.compress(content, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:16]}"'
