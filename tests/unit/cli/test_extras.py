"""Commands and the client without the packages of the extras, which an import hook hides."""

import json
import subprocess
import sys

from tests.support.base_install import ALL_HELP, NEEDS_AN_EXTRA, ROOT, absent_packages

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset(sys.argv[1].split())

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[:] = [Visible if finder is PathFinder else finder for finder in sys.meta_path]
"""


def test_client_and_commands_need_only_the_base_requirements() -> None:
    hidden = absent_packages()
    assert {"ray", "torch", "transformers", "numpy", "sqlalchemy", "starlette", "cryptography", "psutil"} <= hidden
    command = [sys.executable, "-c", HIDE + ALL_HELP, " ".join(hidden), json.dumps(list(NEEDS_AN_EXTRA))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {"longleaf", "grpc", "typer"} <= set(found["modules"])
    assert not {"coordinator", "workers", "gateway"} & set(found["modules"])
    for name, (code, output, _) in found["helped"].items():
        assert (name, code) == (name, 0)
        assert "Usage: " in output
    assert {"serve", "ask", "models check", "contexts rebuild"} <= set(found["helped"])
    assert found["refused"] == [[2, "", f"error: {message}\n"] for message in NEEDS_AN_EXTRA.values()]


def test_gateway_needs_only_its_extra() -> None:
    hidden = absent_packages("http")
    assert {"ray", "torch", "transformers", "numpy", "sqlalchemy", "psutil", "blake3"} <= hidden
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "gateway").rglob("*.py")
    )
    code = HIDE + "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)
    subprocess.run([sys.executable, "-c", code, " ".join(hidden)], cwd=ROOT, check=True)
