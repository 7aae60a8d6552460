"""The security policy: the tests that it names as proofs exist."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.test_operations import ROOT, names_in

PAGE = (Path(ROOT) / "SECURITY.md").read_text()


@pytest.mark.parametrize("message", sorted(set(re.findall(r"`([^`]+\.py::[^`]+)`", PAGE))))
def test_named_proofs_are_tests(message: str) -> None:
    file, _, name = message.partition("::")
    assert name in names_in(ROOT / "tests" / file)


def test_bounds_name_their_proofs() -> None:
    tables = [part.partition("\n\n")[0].splitlines()[1:] for part in PAGE.split("| bound | proven by |\n")[1:]]
    table = [row for each in tables for row in each]
    assert len(table) > 10
    for row in table:
        assert re.fullmatch(r"\| [^|]+ \| (`[^`]+\.py::[^`]+` ?)+\|", row), row
