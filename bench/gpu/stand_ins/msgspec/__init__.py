"""What Longleaf's messages need of msgspec where that is not installed: classes with fields, which nobody sends.

Taken up by `bench.gpu.ground` alone, and only if there is no other.
"""

import dataclasses
from dataclasses import field
from types import SimpleNamespace
from typing import Any

from msgspec import structs

__all__ = ["DecodeError", "Struct", "field", "json", "msgpack", "structs"]


class DecodeError(ValueError):
    """Never raised: nothing is decoded."""


class Struct:
    """A dataclass; what a subclass says of the wire is left out."""

    def __init_subclass__(cls, *, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
        for name in cls.__annotations__:
            default = cls.__dict__.get(name)
            if isinstance(default, (list, dict, set)):  # msgspec copies these, dataclasses refuse them
                setattr(cls, name, field(default_factory=default.copy))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)


def _refuse(*_: object, **__: object) -> Any:
    raise NotImplementedError("msgspec is not installed, and nothing can be sent without it")


json = msgpack = SimpleNamespace(encode=_refuse, decode=_refuse)
