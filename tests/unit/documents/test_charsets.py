"""Names of charsets."""

import encodings

import pytest

from longleaf.documents.text_files import check_encoding
from longleaf.errors import InvalidArgument


@pytest.mark.parametrize("name", ["x" * 41, "x" * 20_000, "", "../utf-8", "utf-8\0", "\u00fctf-8"])
def test_names_of_another_form_are_refused_before_the_lookup(name: str) -> None:
    """Python never forgets a name of a lookup."""
    before = len(vars(encodings)["_cache"])
    with pytest.raises(InvalidArgument, match="is not a known charset"):
        check_encoding(name, "charset")
    assert len(vars(encodings)["_cache"]) == before


@pytest.mark.parametrize("name", ["utf-8", "ISO_8859-1:1987", "latin 1", "windows-1252", "utf-16-le"])
def test_known_names(name: str) -> None:
    assert check_encoding(name, "charset")
