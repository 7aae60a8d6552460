"""Functions for the fields of structs."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

__all__ = ["FieldInfo", "fields", "replace"]


@dataclass(frozen=True)
class FieldInfo:
    """A field of a struct. `default` is dataclasses.MISSING if there is none."""

    name: str
    type: Any
    default: Any


def fields(struct: Any) -> tuple[FieldInfo, ...]:
    """The fields of a struct, with their annotations."""
    types = get_type_hints(struct, include_extras=True)
    return tuple(FieldInfo(field.name, types[field.name], field.default) for field in dataclasses.fields(struct))
