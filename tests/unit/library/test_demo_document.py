"""The demo's document: facts in generated text or in the user's text."""

from pathlib import Path

import pytest

from longleaf.demo.haystack import make_haystack
from longleaf.demo.run import DemoSettings, build
from longleaf.errors import InvalidArgument


def test_generated_document_depends_only_on_the_seed(tmp_path: Path) -> None:
    assert build(DemoSettings(tokens=4000, seed=3)) == make_haystack(3, 4000, facts=5, absent=1)


def test_facts_are_inserted_into_the_users_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("línea una\n" * 100)
    haystack = build(DemoSettings(file=path, seed=1))
    assert haystack.text.replace("línea una\n", "").count("\n") == len(haystack.facts) == 5
    assert all(fact.sentence in haystack.text for fact in haystack.facts)
    assert all(fact.key not in haystack.text for fact in haystack.absent)
    assert len(haystack.absent) == 1


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), (b"\xff", "byte 0")])
def test_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=message):
        build(DemoSettings(file=path))


def test_demo_too_small_for_its_facts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        DemoSettings(tokens=10).check()
