"""Files that are given by their names."""

from pathlib import Path

import pytest

from longleaf.documents.collection import Collector
from longleaf.errors import InvalidArgument


@pytest.mark.parametrize("encoding", ["", "utf-8", "iso-8859-1", "utf-16-le"])
def test_zero_bytes_are_not_text(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "z.bin").write_bytes(bytes(100))
    with pytest.raises(InvalidArgument, match=r"z\.bin: is not text: (byte|character) 0 is zero"):
        Collector(encoding=encoding).collect([str(tmp_path / "z.bin")])


def test_charset_with_zero_bytes_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Hi".encode("utf-16-le"))
    (file,) = Collector(encoding="utf-16-le").collect([str(tmp_path / "a.txt")]).files
    assert [section.text for section in file.sections] == ["Hi"]
