"""One class name means one thing in the whole product."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("coordinator", "workers", "longleaf", "gateway")


def test_public_class_names_are_unique() -> None:
    files = defaultdict[str, list[str]](list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if (ROOT / "longleaf" / "v1") in path.parents:
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(str(path.relative_to(ROOT)))
    assert len(files) > 500
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
