"""The journal's folder: permissions, removal of entries, and storage errors."""

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

EVENTS = [Admitted(5, 3), Tokens(0, (Token(7), Token(8))), Tokens(2, (Token(9),), 1)]
SECRET = "a secret of the tenant"


def entry(request_id: str = "one", context: str | None = None, ids: tuple[int, ...] = (1, 2, 3)) -> GenerationEntry:
    request = Generate(input="", context=context, sampling=Sampling(seed=5, stop=(SECRET,)), resume_seconds=9.0)
    return GenerationEntry(
        request_id=request_id, request=request, question=b"q", prompt=array("I", ids).tobytes(), deadline=4.5
    )


def write(journal: Journal, one: GenerationEntry) -> None:
    with journal.begin(one) as record:
        for event in EVENTS:
            record.append(event)


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_written_entries_are_read_by_another_journal(tmp_path: Path) -> None:
    write(Journal(tmp_path), entry("one"))
    write(Journal(tmp_path), entry("two"))
    found = {retained.entry.request_id: retained for retained in Journal(tmp_path).load()}
    assert found.keys() == {"one", "two"}
    assert found["one"].events == EVENTS
    assert found["one"].entry == entry("one")
    assert list(found["one"].entry.token_ids) == [1, 2, 3]


def test_journal_is_readable_only_for_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "journal"
    folder.mkdir(parents=True, mode=0o755)
    write(Journal(folder), entry("../../etc/passwd"))
    [path] = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "passwd" not in path.name


def test_transient_events_are_not_written(tmp_path: Path) -> None:
    with Journal(tmp_path).begin(entry()) as record:
        record.append(Progress(1, 2))
        record.append(EVENTS[0])
    [retained] = Journal(tmp_path).load()
    assert retained.events == EVENTS[:1]


def test_reused_name_starts_a_new_entry(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.begin(entry()) as before:
        before.append(EVENTS[0])
        with journal.begin(entry(ids=(4,))) as record:
            before.append(EVENTS[1])
            record.append(EVENTS[2])
    [retained] = Journal(tmp_path).load()
    assert (list(retained.entry.token_ids), retained.events) == ([4], EVENTS[2:])


def test_writes_to_a_removed_entry_are_ignored(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.begin(entry()) as record:
        journal.remove("one")
        record.append(EVENTS[0])
    journal.remove("one")
    assert not list(tmp_path.iterdir())
    with pytest.raises(StorageUnavailable):
        journal.reopen("one")


def test_deleting_a_context_removes_its_generations(tmp_path: Path) -> None:
    question = tuple(b"a secret about the white whale")
    ids = array("I", question).tobytes()
    write(Journal(tmp_path), entry("one", "doc", question))
    journal = Journal(tmp_path)
    assert len(list(journal.load())) == 1
    write(journal, entry("two", "doc", question))
    write(journal, entry("three", "other"))
    write(journal, entry("four"))
    assert ids in contents(tmp_path)
    journal.remove_of_context("doc")
    assert ids not in contents(tmp_path)
    assert {retained.entry.request_id for retained in journal.load()} == {"three", "four"}
    journal.remove_of_context("other")
    journal.remove("four")
    assert SECRET.encode() not in contents(tmp_path)


def test_entries_of_another_checkpoint_are_removed(tmp_path: Path) -> None:
    write(Journal(tmp_path, "abc"), entry())
    assert [retained.entry.checkpoint for retained in Journal(tmp_path, "abc").load()] == ["abc"]
    assert not list(Journal(tmp_path, "abd").load())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\x00" * 50, b"not a journal, but some text that is long enough"])
def test_invalid_files_are_removed(tmp_path: Path, content: bytes) -> None:
    write(Journal(tmp_path), entry())
    [path] = tmp_path.iterdir()
    path.write_bytes(content)
    assert not list(Journal(tmp_path).load())
    assert not path.exists()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Simulates a full disk with a limit on file sizes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_an_error_and_keeps_previous_events(tmp_path: Path) -> None:
    with Journal(tmp_path).begin(entry()) as record:
        record.append(EVENTS[0])
        [path] = tmp_path.iterdir()
        with files_of_at_most(path.stat().st_size + 5), pytest.raises(StorageUnavailable, match="too large"):
            record.append(EVENTS[1])
    [retained] = Journal(tmp_path).load()
    assert retained.events == EVENTS[:1]


def test_full_disk_at_the_start_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with files_of_at_most(5), pytest.raises(StorageUnavailable):
        journal.begin(entry())
    assert not list(journal.load())


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="file"):
        Journal(tmp_path / "file" / "journal")
