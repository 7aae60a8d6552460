"""The journal's folder: who may read it, what is removed with whom, and what storage may refuse."""

import resource
import stat
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.engine_messages import Admitted, Tokens
from coordinator.persistence.journal.entries import GenerationEntry
from coordinator.persistence.journal.journal import Journal
from longleaf.errors import StorageUnavailable
from longleaf.sampling import Sampling, Token
from longleaf.types import Generate, Progress

SAID = [Admitted(5, 3), Tokens(0, (Token(7), Token(8))), Tokens(2, (Token(9),), 1)]
SECRET = "what nobody else may know"


def held(request_id: str = "one", context: str | None = None, ids: tuple[int, ...] = (1, 2, 3)) -> GenerationEntry:
    request = Generate(input="", context=context, sampling=Sampling(seed=5, stop=(SECRET,)), resume_seconds=9.0)
    return GenerationEntry(
        request_id=request_id, request=request, question=b"q", prompt=array("I", ids).tobytes(), deadline=4.5
    )


def write(journal: Journal, one: GenerationEntry) -> None:
    with journal.begin(one) as record:
        for event in SAID:
            record.append(event)


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_what_is_written_is_read_by_another(tmp_path: Path) -> None:
    write(Journal(tmp_path), held("one"))
    write(Journal(tmp_path), held("two"))
    found = {retained.held.request_id: retained for retained in Journal(tmp_path).load()}
    assert found.keys() == {"one", "two"}
    assert found["one"].said == SAID
    assert found["one"].held == held("one")
    assert list(found["one"].held.token_ids) == [1, 2, 3]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "journal"
    folder.mkdir(parents=True, mode=0o755)
    write(Journal(folder), held("../../etc/passwd"))
    [path] = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "passwd" not in path.name


def test_what_tells_of_now_alone_is_not_written(tmp_path: Path) -> None:
    with Journal(tmp_path).begin(held()) as record:
        record.append(Progress(1, 2))
        record.append(SAID[0])
    [retained] = Journal(tmp_path).load()
    assert retained.said == SAID[:1]


def test_a_name_that_is_taken_anew_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.begin(held()) as before:
        before.append(SAID[0])
        with journal.begin(held(ids=(4,))) as record:
            before.append(SAID[1])
            record.append(SAID[2])
    [retained] = Journal(tmp_path).load()
    assert (list(retained.held.token_ids), retained.said) == ([4], SAID[2:])


def test_a_generation_that_is_forgotten_may_go_on_unrecorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.begin(held()) as record:
        journal.remove("one")
        record.append(SAID[0])
    journal.remove("one")
    assert not list(tmp_path.iterdir())
    with pytest.raises(StorageUnavailable):
        journal.go_on("one")


def test_a_context_takes_its_generations_with_it(tmp_path: Path) -> None:
    question = tuple(b"what it says of the white whale")
    ids = array("I", question).tobytes()
    write(Journal(tmp_path), held("one", "doc", question))
    journal = Journal(tmp_path)
    assert len(list(journal.load())) == 1
    write(journal, held("two", "doc", question))
    write(journal, held("three", "other"))
    write(journal, held("four"))
    assert ids in contents(tmp_path)
    journal.remove_of_context("doc")
    assert ids not in contents(tmp_path)
    assert {retained.held.request_id for retained in journal.load()} == {"three", "four"}
    journal.remove_of_context("other")
    journal.remove("four")
    assert SECRET.encode() not in contents(tmp_path)


def test_what_another_checkpoint_answered_is_removed(tmp_path: Path) -> None:
    write(Journal(tmp_path, "abc"), held())
    assert [retained.held.checkpoint for retained in Journal(tmp_path, "abc").load()] == ["abc"]
    assert not list(Journal(tmp_path, "abd").load())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\x00" * 50, b"not a journal, but some text that is long enough"])
def test_what_is_no_journal_is_removed(tmp_path: Path, content: bytes) -> None:
    write(Journal(tmp_path), held())
    [path] = tmp_path.iterdir()
    path.write_bytes(content)
    assert not list(Journal(tmp_path).load())
    assert not path.exists()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As if the disk were full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_leaves_what_was_written(tmp_path: Path) -> None:
    with Journal(tmp_path).begin(held()) as record:
        record.append(SAID[0])
        [path] = tmp_path.iterdir()
        with files_of_at_most(path.stat().st_size + 5), pytest.raises(StorageUnavailable, match="too large"):
            record.append(SAID[1])
    [retained] = Journal(tmp_path).load()
    assert retained.said == SAID[:1]


def test_a_disk_that_was_full_before_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with files_of_at_most(5), pytest.raises(StorageUnavailable):
        journal.begin(held())
    assert not list(journal.load())


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="file"):
        Journal(tmp_path / "file" / "journal")
