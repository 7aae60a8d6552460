"""A Hugging Face hub on the loopback interface, with faults.

It speaks the part of the hub's HTTP API that downloads use: the description of a model, its tree, the metadata of files
(with ETags and commits), and redirects of large files to another host, which supports ranges.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 10_000
"""Larger files are in another host's storage."""


@dataclass
class Refusal:
    """An HTTP error."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """Models by name, with their files. Its fields may change while it serves."""

    models: dict[str, dict[str, bytes]]
    commit: str = "c0ffee" * 6 + "beef"
    token: str = ""
    """Required of every call, if not empty."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Errors by the kind of call: api, metadata, content or storage."""
    cut_after: int = 0
    """If not 0, the storage closes each connection after so many bytes of a file's rest."""
    num_cuts: int = 1_000_000
    """Limit of the connections closed in that way."""
    port: int = 0
    calls: list[str] = field(default_factory=list)
    """Kind and path of each call, and the begin of its range."""
    unknown: list[str] = field(default_factory=list)
    """Paths of calls that are not served."""
    leaked: list[str] = field(default_factory=list)
    """Tokens that arrived at the storage, which is another host."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, kind: str) -> int:
        return Counter(call.split()[0] for call in self.calls)[kind]


@contextmanager
def serving(hub: Hub) -> Generator[Hub, None, None]:
    """Serves `hub` during the block, in threads of this process."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/storage/"):
            self._storage(path)
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self._file(path.removeprefix("/"))
        else:
            self.served.unknown.append(path)
            self._send(404, b"", {})

    def _is_refused(self, kind: str, path: str) -> bool:
        """Sends the error that this call deserves, if any."""
        hub = self.served
        hub.calls.append(f"{kind} {path} {self.headers.get('Range', '')}".strip())
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if kind == "storage":
            if given:
                hub.leaked.append(given)
        elif hub.token and given != hub.token:
            message = "Invalid credentials in Authorization header" if given else "Invalid username or password."
            self._send(401, b"", {"X-Error-Message": message})
            return True
        if refusal := hub.refusals.get(kind):
            self._send(refusal.status, b"", refusal.headers)
            return True
        return False

    def _api(self, path: str) -> None:
        if self._is_refused("api", path):
            return
        hub = self.served
        owner, name, *rest = path.split("/")
        files = hub.models.get(f"{owner}/{name}")
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", "v1", hub.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            self._json([_tree_entry(path, content) for path, content in files.items()])
        else:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            self._json({"id": f"{owner}/{name}", "sha": hub.commit, "siblings": siblings})

    def _file(self, path: str) -> None:
        """Metadata (HEAD) and content (GET) of a file; a large one is elsewhere."""
        if self._is_refused("metadata" if self.command == "HEAD" else "content", path):
            return
        owner, name, _, _, file = path.split("/", 4)
        content = self.served.models[f"{owner}/{name}"][file]
        headers = {"X-Repo-Commit": self.served.commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if len(content) <= LARGE_BYTES:
            self._send(200, content, headers)
            return
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'}
        location = f"http://localhost:{self.served.port}/storage/{owner}/{name}/{file}?signature=1"
        self._send(302, b"", headers | {"Location": location})

    def _storage(self, path: str) -> None:
        if self._is_refused("storage", path):
            return
        hub = self.served
        _, _, owner, name, file = path.split("/", 4)
        content = hub.models[f"{owner}/{name}"][file]
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = content[begin:]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._send(206 if begin else 200, rest, headers, is_cuttable=True)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], *, is_cuttable: bool = False) -> None:
        hub = self.served
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_cuttable and hub.cut_after and hub.num_cuts and self.command == "GET" and len(content) > hub.cut_after:
            hub.num_cuts -= 1
            content = content[: hub.cut_after]
            self.close_connection = True
        self.wfile.write(content)


def _tree_entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if len(content) > LARGE_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
