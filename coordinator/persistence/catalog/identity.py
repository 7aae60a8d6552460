"""Identity of a model, used as the name of its data folder and in manifests on storage."""

import json
from pathlib import Path
from typing import Any, cast

import msgspec
from blake3 import blake3

from longleaf.config import DtypeName
from longleaf.fingerprint import CONFIG, read_fingerprint

DTYPE = "dtype"


class Identity(msgspec.Struct, frozen=True):
    """A checkpoint with the dtype in which it is served: equal identities have equal keys."""

    digest: str
    """Hexadecimal digits of the digest."""
    facts: dict[str, str]
    """Parts of the identity, to explain a difference: digests of files by name, and the dtype."""


def read_identity(model: Path, dtype: DtypeName) -> Identity:
    """The identity of the checkpoint in a folder. Raises ModelRefused."""
    found = read_fingerprint(model)
    facts = found.files | {DTYPE: _own_dtype(model) if dtype == "auto" else dtype}
    return Identity(blake3(f"{found.digest} {facts[DTYPE]}".encode()).hexdigest(), facts)


def _own_dtype(folder: Path) -> str:
    """The dtype that a checkpoint's config names; empty if it names none."""
    config = cast(dict[str, Any], json.loads((folder / CONFIG).read_bytes()))
    texts = cast(dict[str, Any], config.get("text_config") or {})
    found = (texts.get(name) or config.get(name) for name in ("dtype", "torch_dtype"))
    return next((str(name) for name in found if name), "")
