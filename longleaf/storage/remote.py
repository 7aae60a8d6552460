"""Objects on any storage supported by fsspec, such as S3."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any

from longleaf.storage.files import ObjectInfo

_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""Keys under which the drivers report the modification time."""


class RemoteFiles:
    """Objects below `root` of an fsspec file system, each written in one call, which is atomic in object stores."""

    def __init__(self, file_system: Any, root: str) -> None:
        self._files = file_system
        self._root = root.rstrip("/")

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        # object stores require contiguous memory
        content, path = b"".join(parts), self._path(name)
        options = {"mode": "create"} if is_new else {}
        try:
            self._files.pipe_file(path, content, **options)
        except FileNotFoundError:
            if self._files.async_impl:  # an object store, which has no folders; s3fs would create a bucket
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content, **options)
        except OSError as error:
            if is_new and _code(error) == "PreconditionFailed":  # s3fs does not map this S3 error
                raise FileExistsError(errno.EEXIST, "there is one", name) from error
            raise

    def read(self, name: str) -> bytes:
        try:
            return self._files.cat_file(self._path(name))
        except FileNotFoundError as error:
            _check_bucket(error)
            raise

    def find(self, name: str) -> ObjectInfo | None:
        try:
            info = self._files.info(self._path(name))
        except FileNotFoundError as error:
            _check_bucket(error)
            return None
        return _entry(name, info) if info["type"] == "file" else None

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        path = self._path(folder) if folder else self._root
        try:
            found: dict[str, dict[str, Any]] = self._files.find(path, detail=True)
        except FileNotFoundError as error:
            _check_bucket(error)
            return
        for name, info in sorted(found.items()):
            if info["type"] == "file":
                yield _entry(name[len(self._root) + 1 :], info)

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError as error:
            _check_bucket(error)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _check_bucket(error: FileNotFoundError) -> None:
    """Raises OSError for a missing bucket, which drivers report like a missing object."""
    if _code(error) == "NoSuchBucket":
        raise OSError(errno.ENXIO, "the bucket does not exist") from error


def _code(error: OSError) -> str:
    """S3's error code, if there is one."""
    response: dict[str, dict[str, str]] = getattr(error.__cause__, "response", {})
    return response.get("Error", {}).get("Code", "")


def _entry(name: str, attributes: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(
        name,
        attributes["size"],
        next((_seconds(attributes[key]) for key in _TIMES if attributes.get(key) is not None), inf),
    )


def _seconds(value: datetime | str | float) -> float:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)
