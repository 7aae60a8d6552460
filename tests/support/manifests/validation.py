"""Manifests against schemas, strictly: fields that an API server would drop silently are errors."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES = "1.29"
"""The oldest version that the manifests are for."""
SCHEMAS = Path(__file__).with_name("schemas")


def errors(document: dict[str, Any]) -> list[str]:
    """The locations where the document violates the schema of its kind."""
    path = SCHEMAS / f"{document['kind'].lower()}.json"
    if path.exists():
        return [f"{_path(error)}: {error.message}" for error in _validator(path).iter_errors(document)]
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{_path(error)}: {error.message}"]
    return []


@cache
def _validator(path: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))


def _path(error: Any) -> str:
    return ".".join(map(str, error.absolute_path))


def all_errors(documents: list[dict[str, Any]]) -> Iterator[str]:
    for one in documents:
        yield from (f"{one['kind']} {one['metadata']['name']}: {reported}" for reported in errors(one))
