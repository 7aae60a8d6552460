"""The base installation, which has the client library and its commands and none of the extras."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

NEEDS_AN_EXTRA = {
    ("serve",): "longleaf serve needs the server: pip install 'longleaf[server]'",
    ("demo",): "longleaf demo needs the server: pip install 'longleaf[server]'",
    ("models", "check", "."): "longleaf models check needs the server: pip install 'longleaf[server]'",
    ("models", "fetch", "file:///x", "y"): "longleaf models fetch needs the server: pip install 'longleaf[server]'",
    ("contexts", "rebuild", "--from", "x", "--data-dir", "y"): (
        "longleaf contexts rebuild needs the server: pip install 'longleaf[server]'"
    ),
    ("ingest", "/"): "ingesting the folder / needs the readers of documents: pip install 'longleaf[documents]'",
    ("gateway",): "longleaf gateway needs the HTTP gateway: pip install 'longleaf[http]'",
}
"""Commands, and the error that each prints in the base installation, with exit code 2."""

ALL_HELP = """
import contextlib, io, json, sys
import typer
import longleaf.client
from longleaf.cli import app

def paths(command, path):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, [*path, name])

def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app.main(list(arguments))
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()

helped = {" ".join(path): run(*path, "--help") for path in paths(typer.main.get_command(app.app), [])}
refused = [run(*arguments) for arguments in json.loads(sys.argv[-1])]
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"helped": helped, "refused": refused, "modules": modules}))
"""
"""A program that imports the client, prints the help of every command, and runs the commands of its last argument."""


def requirements(*extras: str) -> list[str]:
    """Names of the distributions that an installation with these extras requires directly."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    lines = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [_name(Requirement(line).name) for each in lines for line in each]


def closure(names: list[str]) -> set[str]:
    """The distributions with these names and all that they require, as installed here."""
    found, pending = set[str](), list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += _required(name)
    return found


def absent_packages(*extras: str) -> set[str]:
    """Third-party packages that are installed here, but not by an installation with these extras."""
    allowed = closure(requirements(*extras)) | {"longleaf"}
    found = metadata.packages_distributions()
    return {package for package, owners in found.items() if not allowed & {_name(owner) for owner in owners}}


def _required(name: str) -> Iterator[str]:
    found = map(Requirement, metadata.requires(name) or [])
    return (_name(each.name) for each in found if each.marker is None or each.marker.evaluate({"extra": ""}))


def _name(distribution: str) -> str:
    """The normalized name."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
