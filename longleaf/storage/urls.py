"""Storage URLs: choice of the backend, and display without secrets."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longleaf.errors import InvalidArgument
from longleaf.storage.files import Files
from longleaf.storage.local import LocalFiles
from longleaf.storage.remote import RemoteFiles

FIELD = "snapshot_url"
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)(:(?://)?)")
_LOCAL = ("file", "local")
_EXTRAS = {"s3": "'longleaf[s3]'", "s3a": "'longleaf[s3]'"}
"""Extras that install the tested drivers."""


def shown(url: str) -> str:
    """`url` without user, password and query."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def connect(url: str) -> Files:
    """The storage at `url`: a folder, as a path or file://, or any URL that fsspec supports.

    Raises InvalidArgument for other URLs, and the exceptions of drivers that connect immediately.
    """
    _check(url)
    match = _SCHEME.match(url)
    if match is None or match[1].lower() in _LOCAL:
        return LocalFiles(Path(url[match.end() if match else 0 :]).expanduser().absolute())
    return _remote(url, match[1].lower())


def _check(url: str) -> None:
    """Raises InvalidArgument for URLs that a driver would misinterpret."""
    match = _SCHEME.match(url)
    if not url or "\0" in url:
        raise InvalidArgument(FIELD, "is not a path: give a folder, or a URL such as s3://bucket/folder")
    if "::" in url:
        raise InvalidArgument(FIELD, f"{shown(url)} chains drivers: give the URL of the storage itself")
    if match is None:
        return
    if match[2] != "://":
        raise InvalidArgument(FIELD, f"{url!r} is neither a path nor a URL: write {match[1]}://...")
    parts = urlsplit(url)
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise InvalidArgument(FIELD, f"{shown(url)} has a query: settings and credentials belong in the environment")
    if match[1].lower() in _LOCAL and parts.netloc:
        raise InvalidArgument(FIELD, f"{shown(url)} names a host: a folder of this machine is file:///path")


def _remote(url: str, scheme: str) -> Files:
    fsspec: Any = import_module("fsspec")  # slow to import, and not needed for folders
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise InvalidArgument(FIELD, f"{shown(url)}: unknown scheme {scheme}://") from None
    except ImportError as error:
        package = _EXTRAS.get(scheme)
        hint = f"pip install {package}" if package else str(error)
        raise InvalidArgument(FIELD, f"{shown(url)} needs a package that is not installed: {hint}") from None
    # a cached file system, with its cached listings, would be shared by all users of the same URL
    file_system, root = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    return RemoteFiles(file_system, root)
