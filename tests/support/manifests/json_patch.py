"""JSON patches (RFC 6902), as much of them as the manifests use: `test`, `add`, `replace` and `remove`."""

import copy
from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
END = "-"


def patched(document: Document, operations: Sequence[Document]) -> Document:
    """A copy of the document with all operations applied. Raises KeyError or IndexError for a missing location, and
    ValueError for a test that fails.
    """
    found = copy.deepcopy(document)
    for operation in operations:
        *way, last = [word.replace("~1", "/").replace("~0", "~") for word in operation["path"].split("/")[1:]]
        place: Any = found
        for word in way:
            place = place[_key(place, word)]
        _do(operation, place, last)
    return found


def _key(place: Any, word: str) -> str | int:
    return int(word) if isinstance(place, list) else word


def _do(operation: Document, place: Any, last: str) -> None:
    kind = operation["op"]
    if kind == "add" and isinstance(place, list):
        place.insert(len(place) if last == END else int(last), copy.deepcopy(operation["value"]))
        return
    key = _key(place, last)
    if kind == "add":
        place[key] = copy.deepcopy(operation["value"])
        return
    old = place[key]  # a missing location can be neither tested nor changed
    if kind == "test":
        if old != operation["value"]:
            raise ValueError(f"{operation['path']} is {old}, not {operation['value']}")
    elif kind == "replace":
        place[key] = copy.deepcopy(operation["value"])
    elif kind == "remove":
        del place[key]
    else:
        raise KeyError(kind)
