"""Values of `--model`: a folder, a packaged model, a model on the hub, a GGUF file, a model in a wheel, or a URL."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from longleaf.errors import StartError

PACKAGED = "lookup"
"""Name of the model that the package contains."""
IN_WHEEL = "smollm2"
"""Name of the model that a wheel on the package index contains."""
GGUF_SUFFIX = ".gguf"
HUB_SCHEME = "hf://"
_HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*?)(?:@(?P<revision>[^@\s]+))?", re.ASCII)


class LocalFolder(msgspec.Struct, frozen=True):
    """A folder of this machine, which need not exist."""

    path: Path


class PackagedModel(msgspec.Struct, frozen=True):
    """The look-up model of the package."""


class WheelModel(msgspec.Struct, frozen=True):
    """SmolLM2 from the package index."""


class GgufFile(msgspec.Struct, frozen=True):
    """A GGUF file, which need not exist."""

    path: Path


class HubModel(msgspec.Struct, frozen=True):
    """A model of the Hugging Face hub. `revision` is a branch, a tag or a commit; None: the default branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


class StorageUrl(msgspec.Struct, frozen=True):
    """A folder at a URL that fsspec supports."""

    url: str


Source = LocalFolder | PackagedModel | WheelModel | GgufFile | HubModel | StorageUrl


def parse_source(value: str) -> Source:
    """The source that `value` names. A folder or a file that exists precedes a model with the same name.

    Raises StartError for a value that names none of them.
    """
    if not value or "\0" in value:
        raise StartError(f"{value!r} is not a model: give a folder, ORG/NAME, FILE.gguf or smollm2")
    if "://" in value:
        return _parse_url(value)
    path = Path(value).expanduser()
    if path.is_dir():
        return LocalFolder(path)
    if value.lower().endswith(GGUF_SUFFIX):
        return GgufFile(path)
    if path.is_file():
        raise StartError(f"{value} is a file: give the folder of a checkpoint, or a GGUF file")
    if value == PACKAGED:
        return PackagedModel()
    if value == IN_WHEEL:
        return WheelModel()
    found = _HUB_NAME.fullmatch(value)
    return LocalFolder(path) if found is None else HubModel(found["repository"], found["revision"])


def _parse_url(value: str) -> Source:
    if value.startswith(HUB_SCHEME):
        found = _HUB_NAME.fullmatch(value.removeprefix(HUB_SCHEME).rstrip("/"))
        return StorageUrl(value) if found is None else HubModel(found["repository"], found["revision"])
    parts = urlsplit(value)
    if parts.scheme == "file" and not parts.netloc:
        return LocalFolder(Path(unquote(parts.path)))
    return StorageUrl(value)
