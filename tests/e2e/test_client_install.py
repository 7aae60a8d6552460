"""The wheel without extras in an empty environment: its size, its commands, and the client against a real service."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.base_install import ALL_HELP, NEEDS_AN_EXTRA, ROOT
from tests.support.command_line import Served

pytestmark = pytest.mark.extended

MAX_BYTES = 62_000_000
FORBIDDEN = (
    "alembic blake3 cryptography fsspec jinja2 numpy opentelemetry-api prometheus-client psutil pyzmq ray s3fs "
    "safetensors sqlalchemy starlette tokenizers torch transformers triton uvicorn uvloop"
).split()
CLIENT = """
import sys
from longleaf.client import Client

with Client(sys.argv[1], tls_ca="", tls_cert="", tls_key="", credential="") as client:
    context = client.ingest("sea", "The sea is deep. " * 50)
    *_, end = client.ask("sea", "How deep?", max_tokens=4, ignore_end_token=True)
    print(context.tokens, end.usage.completion_tokens, [each.id for each in client.list_contexts()])
    client.delete_context("sea")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of an environment with the wheel and the base requirements in the versions of the lock."""
    folder = tmp_path_factory.mktemp("install")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    venv.create(folder / "venv", with_pip=False)
    (wheel,) = folder.glob("longleaf-*.whl")
    lock = str(ROOT / "requirements.lock")
    pip("--python", str(folder / "venv" / "bin" / "python"), "install", "--constraint", lock, str(wheel))
    return folder / "venv" / "bin"


def pip(*arguments: str) -> None:
    """Skips the test if the package registry cannot be reached; fails where REQUIRE_WHEELS is set."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        (pytest.fail if os.environ.get("REQUIRE_WHEELS") else pytest.skip)(f"pip: {done.stdout.strip()[-400:]}")


def run(program: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program of the environment, without access to this repository or to the environment of the tests."""
    hidden = ("PYTHON", "LONGLEAF", "COVERAGE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    folder = program.parent
    return subprocess.run([program, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_installation_is_small_and_has_no_server(installed: Path) -> None:
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    names = {re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower() for path in packages.glob("*.dist-info")}
    assert {"grpcio", "longleaf", "msgspec", "typer"} <= names
    assert not names & set(FORBIDDEN)
    assert sum(path.lstat().st_size for path in packages.rglob("*") if path.is_file()) < MAX_BYTES
    shipped = (path.relative_to(packages).parts for path in packages.glob("**/*.py"))
    assert not [parts for parts in shipped if parts[0] in ("tests", "bench", "zoo") or parts[-1] == "fakes.py"]
    code = {path.relative_to(packages) for path in packages.glob("longleaf/**/*.[ch]")}
    assert code == {path.relative_to(ROOT) for path in ROOT.glob("longleaf/**/*.[ch]")}, "C code and its headers"


def test_every_command_has_help_or_names_its_extra(installed: Path) -> None:
    done = run(installed / "python", "-P", "-c", ALL_HELP, json.dumps(list(NEEDS_AN_EXTRA)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [code for code, _, _ in found["helped"].values()] == [0] * len(found["helped"])
    assert found["refused"] == [[2, "", f"error: {message}\n"] for message in NEEDS_AN_EXTRA.values()]
    assert "Usage: longleaf " in run(installed / "longleaf", "--help").stdout
    refused = run(installed / "longleaf", "serve")
    assert (refused.returncode, refused.stderr) == (2, f"error: {NEEDS_AN_EXTRA['serve',]}\n")


def test_client_and_commands_use_a_service(installed: Path, served: Served, tmp_path: Path) -> None:
    done = run(installed / "python", "-P", "-c", CLIENT, served.address)
    assert done.returncode == 0, done.stderr
    tokens, generated, names = done.stdout.split(maxsplit=2)
    assert (int(tokens) > 100, generated) == (True, "4")
    assert "sea" in names
    book = tmp_path / "book.txt"
    book.write_text("The keeper lives by the sea. " * 40)
    address = ("--server", served.address)
    assert run(installed / "longleaf", "ingest", str(book), "--name", "isle", *address).returncode == 0
    asked = run(installed / "longleaf", "ask", "isle", "Who?", "--max-tokens", "3", "--json", *address)
    assert json.loads(asked.stdout.splitlines()[-1])["usage"]["completion_tokens"] <= 3
    assert "isle" in run(installed / "longleaf", "contexts", "list", *address).stdout
    archive = str(tmp_path / "isle.context")
    assert run(installed / "longleaf", "contexts", "export", "isle", archive, *address).returncode == 0
    assert run(installed / "longleaf", "contexts", "delete", "isle", *address).returncode == 0
