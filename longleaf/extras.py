"""Optional parts of the package, which are installed as extras. The base is the client library and its commands."""

from importlib.util import find_spec
from typing import Literal

from longleaf.errors import StartError

Extra = Literal["server", "http", "gguf", "documents"]
PARTS: dict[Extra, tuple[str, tuple[str, ...]]] = {
    "server": ("the server", ("ray", "torch", "transformers")),
    "gguf": ("the reader of GGUF files", ("accelerate", "gguf")),
    "documents": ("the readers of documents", ("docx", "lxml", "pathspec", "pptx", "pypdfium2")),
    "http": ("the HTTP gateway", ("starlette", "uvicorn")),
}
"""Name of the part, and packages that only this part installs."""


def require_extra(extra: Extra, command: str) -> None:
    """Raises StartError if the packages of `extra` are not installed. Imports none of them."""
    name, packages = PARTS[extra]
    if any(find_spec(package) is None for package in packages):
        raise StartError(f"{command} needs {name}: pip install 'longleaf[{extra}]'")
