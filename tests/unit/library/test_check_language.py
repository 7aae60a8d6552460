"""`make check` counts phrases and names to avoid."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "check_language.py"))


@pytest.mark.parametrize(
    ("suffix", "source", "found"),
    [
        (
            ".py",
            'def tell_all(x):\n    """What runs is told."""\n',
            {"names.tell", "docstrings.tell", "docstrings.clause_as_noun"},
        ),
        (".py", 'def publish(x):\n    """Publish running calls."""\n', set()),
        (
            ".py",
            'raise KeyError("nobody has it")  # of all messages\n',
            {"messages.nobody", "comments.fronted_genitive"},
        ),
        (".py", "kept = 1\nself.told = 2\nfor lives in x: pass\n", {"names.kept", "names.told", "names.lives"}),
        (".py", "kept + told\n", set()),
        (".md", "A page.\n\n```sh\nwho says what\n```\n", set()),
        (".md", "Nobody goes on.\n", {"pages.nobody", "pages.personification"}),
        (".html", "<p title=what>Said</p>", {"pages.tell"}),
        (".js", 'let told = "it says so"; // anew\n', {"pages.tell", "pages.personification"}),
        (".yaml", "what: told  \n# whoever reads\n", {"comments.nobody"}),
    ],
)
def test_patterns_are_found_by_kind(suffix: str, source: str, found: set[str]) -> None:
    patterns = SCRIPT["PATTERNS"]
    seen = set[str]()
    for text in SCRIPT["READERS"][suffix](source):
        if text.kind == "names":
            parts = (part.lower() for part in SCRIPT["PART"].findall(text.content))
            seen |= {f"names.{part}" for part in parts if part in SCRIPT["WORDS"]}
        else:
            seen |= {f"{text.kind}.{name}" for name, compiled in patterns.items() if compiled.search(text.content)}
    assert seen == found
