"""Settings that are declared once. A field of a struct that is annotated with `Option` is a flag of a command, a row of
docs/configuration.md, and a value with a limit."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from msgspec.structs import FieldInfo, fields

from longleaf.errors import InvalidArgument
from longleaf.formatting import human_number

MAX_PORT = 65535
MAX_SECONDS = 1e6
GROUPS = SERVICE, UPSTREAM, ADDRESS, HTTP, STORAGE, RANKS, KEYS, REQUESTS, LOSSES, SECURITY, TELEMETRY, METRICS = (
    "Model and address",
    "Service",
    "Address",
    "HTTP",
    "Persistence",
    "Ranks",
    "Keys and values",
    "Requests and time limits",
    "Lost ranks",
    "Security",
    "Metrics, logs and traces",
    "Metrics and logs",
)
"""Headings of the options of a service and of a gateway, in the order of the help page."""
Struct = TypeVar("Struct", bound=msgspec.Struct)


@dataclass(frozen=True)
class Limit:
    """The valid values of a number, both ends included."""

    low: float
    high: float = inf
    metavar: str | None = None
    """Name of the value on the help page; None: by its type."""
    rule: str = ""
    """Replaces "between LOW and HIGH" in errors and documents."""
    show: Callable[[Any], str] = human_number

    def __str__(self) -> str:
        return self.rule or f"between {self.show(self.low)} and {self.show(self.high)}"

    def check(self, name: str, value: float) -> None:
        """Raises InvalidArgument for a `value` of the setting `name` that is out of range or not a number."""
        if not self.low <= value <= self.high:
            raise InvalidArgument(name, f"{self.show(value)} is not {self}")


PORTS = Limit(0, MAX_PORT, "PORT", show=str)
BYTES = Limit(1, metavar="BYTES", rule="a positive number of bytes")


def seconds(low: float, high: float = MAX_SECONDS) -> Limit:
    """A limit of a time."""
    return Limit(low, high, "SECONDS")


@dataclass(frozen=True)
class Option:
    """Describes a setting for the command line and the documentation."""

    group: str = ""
    """Heading on the help page; empty: the setting is not a flag."""
    help: str = ""
    _: KW_ONLY
    default: str | bool = True
    """Describes a default that is computed; False: no default is shown."""
    flag_default: Any = None
    """The value without the flag, unless it is the default of the field."""
    metavar: str | None = None
    """Name of the value on the help page; None: that of the limit."""
    limit: Limit | None = None
    flag: str = ""
    """Empty: the name of the field."""
    after: str = ""
    """A setting of another struct that precedes this one, and the following ones of its struct, on the help page."""
    is_path: bool = False
    """Whether the value is the path of a file or a folder."""


@dataclass(frozen=True)
class Setting:
    """A field of a struct with its option."""

    field: FieldInfo
    option: Option

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def kind(self) -> Any:
        """The type without its annotation."""
        return get_args(self.field.type)[0]

    @property
    def metavar(self) -> str | None:
        """Name of the value on the help page; None: by its type."""
        return self.option.metavar or (self.option.limit.metavar if self.option.limit else None)

    @property
    def flag(self) -> str:
        return self.option.flag or flag_of(self.name)

    @property
    def names(self) -> str:
        """The flag; for a setting that is on by default, also the flag that turns it off, after a slash."""
        return f"{self.flag}/--no-{self.flag.removeprefix('--')}" if self.field.default is True else self.flag


def flag_of(name: str) -> str:
    """Command-line flag with the name of a field."""
    return f"--{name.replace('_', '-')}"


@cache
def own_settings(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The fields of `struct` that have an option."""
    found = ((field, option) for field in fields(struct) for option in getattr(field.type, "__metadata__", ()))
    return tuple(Setting(field, option) for field, option in found if isinstance(option, Option))


def parts_of(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields of `struct` that are structs themselves, with their types."""
    return {
        field.name: field.type
        for field in fields(struct)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


@cache
def flags_of(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The settings of `struct` and its parts that are flags, in the order of the help page. Those of its parts precede
    its own."""
    found: list[Setting] = []
    for part in (*parts_of(struct).values(), struct):
        place = len(found)
        for setting in own_settings(part):
            place = next((i for i, each in enumerate(found, 1) if each.name == setting.option.after), place)
            found.insert(place, setting)
            place += 1
    shown = (setting for setting in found if setting.option.group)
    return tuple(sorted(shown, key=lambda setting: GROUPS.index(setting.option.group)))


def flag_names(*structs: type[msgspec.Struct]) -> dict[str, str]:
    """The flags of all settings, by the names of their fields."""
    return {setting.name: setting.flag for struct in structs for setting in flags_of(struct)}


def with_flag_names(text: str, flags: Mapping[str, str]) -> str:
    """`text` with the names of settings replaced by their flags, except names that are ordinary words."""
    known = "|".join(sorted((name for name in flags if "_" in name), key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{known})(?![\w/-]|\.\w)", lambda found: flags[found[0]], text)


def check_limits(config: msgspec.Struct) -> None:
    """Raises InvalidArgument naming the first setting that is out of range. Parts are not checked."""
    for setting in own_settings(type(config)):
        value = getattr(config, setting.name)
        if setting.option.limit is not None and value is not None:
            setting.option.limit.check(setting.name, value)


def config_from_flags(struct: type[Struct], values: Mapping[str, Any]) -> Struct:
    """A struct and its parts, from values of flags by the names of their fields. None gives the default. Raises
    InvalidArgument naming a flag that is out of range and has a `flag_default`."""
    given = {name: values[name] for name in struct.__struct_fields__ if values.get(name) is not None}
    for setting in own_settings(struct):
        option = setting.option
        if option.flag_default is not None:  # which need not be in range
            if option.limit is not None and setting.name in given:
                option.limit.check(setting.name, given[setting.name])
            given.setdefault(setting.name, option.flag_default)
    given |= {name: str(value) for name, value in given.items() if isinstance(value, Path)}
    parts = {name: config_from_flags(part, values) for name, part in parts_of(struct).items()}
    return struct(**given, **parts)


def to_argument(config: msgspec.Struct) -> str:
    """The settings as one argument of a command. Names of files may contain any bytes, which msgspec's own JSON does
    not permit."""
    return json.dumps(msgspec.to_builtins(config))


def config_from_argument(struct: type[Struct], text: str) -> Struct:
    """The reverse of `to_argument`."""
    return msgspec.convert(json.loads(text), struct)
