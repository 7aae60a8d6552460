"""Fills in the templates beside this file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Row = Mapping[str, Any]


def render(name: str, **values: object) -> str:
    """The page called `name`. Raises UndefinedError if a row lacks a value that the page shows."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": format, "counted": counted, "ran_on": ran_on}
    return environment.get_template(f"{name}.md.jinja").render(values)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ran_on(found: Row | Sequence[Row]) -> str:
    """The machines of rows, one in a line."""
    rows = [found] if isinstance(found, Mapping) else found
    return "\n".join(sorted({f"- {machine(row['machine'])}" for row in rows}))


def machine(info: Row) -> str:
    """Hardware and versions in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return f"{info['cpu']}, {info['logical_cores']} logical cores, Python {info['python']}, {versions}; {info['date']}"
