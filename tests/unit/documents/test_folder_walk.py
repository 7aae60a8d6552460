"""Files of a folder."""

from pathlib import Path

import pytest

from longleaf.documents.folder_walk import MAX_PATTERNS, FolderWalk
from longleaf.errors import InvalidArgument


def walk(folder: Path, **options: int) -> dict[str, str]:
    return {file.name: file.refused for file in FolderWalk(folder, **options).files()}


def test_ignored_hidden_and_linked_files_are_left_out(tmp_path: Path) -> None:
    """Rules of an inner folder take precedence over those of an outer one."""
    root = tmp_path / "tree"
    for name in ("a.py", "b.log", "build/x.py", "sub/c.log", "sub/keep.log", "sub/deep/keep.log", ".git/config"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / ".gitignore").write_text("*.log\n/build/\n")
    (root / "sub" / ".gitignore").write_text("!keep.log\n")
    (root / "link").symlink_to("/etc/passwd")
    (root / "loop").symlink_to(root)
    assert walk(root) == {
        "tree/.git/": "is hidden",
        "tree/.gitignore": "is hidden",
        "tree/a.py": "",
        "tree/b.log": "is excluded by .gitignore",
        "tree/build/": "is excluded by .gitignore",
        "tree/link": "is a link",
        "tree/loop": "is a link",
        "tree/sub/.gitignore": "is hidden",
        "tree/sub/c.log": "is excluded by .gitignore",
        "tree/sub/deep/keep.log": "",
        "tree/sub/keep.log": "",
    }


def test_number_of_files_is_limited(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / str(i)).write_text("x")
    assert len(walk(tmp_path, max_files=3)) == 3
    with pytest.raises(InvalidArgument, match="has more than 2 files: give a smaller folder, or exclude some in"):
        walk(tmp_path, max_files=2)


def test_patterns_with_many_stars_are_reported(tmp_path: Path) -> None:
    """They would take time without end for a long name."""
    (tmp_path / ("a" * 200)).write_text("x")
    (tmp_path / "b.log").write_text("x")
    (tmp_path / ".gitignore").write_text(f"# {'* ' * 9}\n{'*a' * 20}*b\n*a*a*a*b\n{'a*/' * 5}\n**/*.log\n")
    found = [(file.path.name, file.refused) for file in FolderWalk(tmp_path).files()]
    assert found == [
        (
            ".gitignore",
            "has 3 patterns with too many stars, not applied: the limit is 3 between slashes, and 4 in all",
        ),
        (".gitignore", "is hidden"),
        ("a" * 200, ""),
        ("b.log", "is excluded by .gitignore"),
    ]


def test_invalid_patterns_are_reported_with_their_lines(tmp_path: Path) -> None:
    """The other patterns apply, as in git."""
    for name in ("a.log", "b.tmp", "b.txt", "c.tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("# logs\n\n*.log\n[z-a]\n!\n*.tmp\n!b.tmp\n")
    found = walk(tmp_path)
    assert {name.partition("/")[2]: reason for name, reason in found.items() if not name.endswith(".gitignore")} == {
        "a.log": "is excluded by .gitignore",
        "b.tmp": "",
        "b.txt": "",
        "c.tmp": "is excluded by .gitignore",
    }
    remarks = [file.refused for file in FolderWalk(tmp_path).files() if file.path.name == ".gitignore"]
    assert remarks == ["has 2 invalid patterns, not applied: line 4, line 5", "is hidden"]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="gone: cannot be read: No such file or directory"):
        walk(tmp_path / "gone")


def test_pipes_are_left_out_and_deep_folders_are_cut(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    deep = tmp_path
    for _ in range(70):
        deep /= "d"
    deep.mkdir(parents=True)
    found = walk(tmp_path)
    assert found.pop(f"{tmp_path.name}/pipe") == "is not a regular file"
    assert list(found.values()) == ["is more than 64 levels deep"]


def test_number_and_length_of_patterns_are_limited(tmp_path: Path) -> None:
    """Each name is compared with all patterns of the folders above it."""
    (tmp_path / "sub").mkdir()
    (tmp_path / ".gitignore").write_text("# a comment\n\n*.log\n" + "".join(f"x{i}\n" for i in range(MAX_PATTERNS - 2)))
    (tmp_path / "sub" / ".gitignore").write_text(f"{'a' * 1001}\nfirst\nsecond\n")
    for name in ("a.log", "first", "second"):
        (tmp_path / "sub" / name).write_text("x")
    found = {name.removeprefix(f"{tmp_path.name}/sub/"): reason for name, reason in walk(tmp_path).items()}
    assert (found["a.log"], found["first"], found["second"]) == (*["is excluded by .gitignore"] * 2, "")
    reasons = [file.refused for file in FolderWalk(tmp_path).files() if file.name.endswith("sub/.gitignore")]
    assert reasons[:2] == [
        "has 1 pattern with more than 1,000 characters, not applied",
        "has 1 pattern too many, not applied: the limit is 2,000, which includes those of the folders above",
    ]
