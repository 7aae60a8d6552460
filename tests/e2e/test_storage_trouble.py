"""Services whose storage of snapshots is damaged while they are away, or in trouble while they run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig, embedded_model
from longleaf.demo.haystack import make_haystack
from longleaf.launch import coordinator_command
from tests.e2e.test_restart import Service, ask, wait_until
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.timeout(300)
BOOK = make_haystack(7, 1_500, 1, 0)
QUESTION = BOOK.facts[0].question
AGAIN = "done again"
AWAY = "not done for now"


class Watched(Service):
    """Tells what it has logged."""

    @property
    def said(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def num_said(self, words: str) -> int:
        return self.said.count(words)


@contextmanager
def serving(
    data_dir: Path, world_size: int = 1, *, url: str | Path | None = None, quota: int | None = None
) -> Iterator[tuple[Watched, Client]]:
    config = EngineConfig(
        model=str(embedded_model()), world_size=world_size, snapshot_url=None if url is None else str(url)
    )
    data = DataConfig(data_dir=str(data_dir), snapshot_quota=quota)
    command = coordinator_command(config, launcher="local", host="127.0.0.1", port=0, data=data)
    with Watched(command) as service, Client(service.wait_ready(120)) as client:
        yield service, client


def saved(folder: Path) -> list[Path]:
    """The folders with manifests, in the order of their segments."""
    found = [path.parent for path in folder.rglob("manifest")]
    return sorted(found, key=lambda path: int(path.parent.name.rpartition("-")[2]))


def ingest(client: Client, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Contexts with segments from 0 on, and what they answer."""
    for name in names:
        client.ingest(name, f"{name}. {BOOK.text}")
    return {name: ask(client, name, QUESTION)[0] for name in names}


# --- while the service is away ---


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def first_piece(folder: Path) -> Path:
    return folder / "piece-00000.safetensors"


def add_strangers(folder: Path) -> None:
    """Files that no service writes."""
    (folder / ".nfs0000000000000001").write_bytes(b"a file that was deleted while somebody read it")
    (folder / ("n" * 255)).write_bytes(b"a huge name")
    (folder / "loop").symlink_to(folder / "loop")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(first_piece(folder), 1000),
    "flipped": lambda folder: flip(first_piece(folder)),
    "gone": lambda folder: first_piece(folder).unlink(),
    "of no manifest": lambda folder: (folder / "manifest").unlink(),
    "of a flipped manifest": lambda folder: flip(folder / "manifest"),
    "among strangers": add_strangers,
}


def test_what_is_damaged_is_told_read_again_and_saved_anew(tmp_path: Path) -> None:
    names = [f"context-{i}" for i in range(len(DAMAGES))]
    with serving(tmp_path, 2) as (service, client):
        before = ingest(client, names)
        wait_until(lambda: len(saved(tmp_path)) == len(names))
        service.kill()
    folders = saved(tmp_path)
    for folder, damage in zip(folders, DAMAGES.values(), strict=True):
        damage(folder)
        add_strangers(folder.parent)
    with serving(tmp_path) as (service, client):
        for name, answer in before.items():
            assert ask(client, name, QUESTION) == (answer, True)
        assert service.num_said("is damaged, and its tokens are read again") == 4
        assert service.num_said("1 snapshots are not at") == 1
        wait_until(lambda: len(saved(tmp_path)) == len(names) and not set(folders[:-1]) & set(saved(tmp_path)))
        for name in names:
            client.delete_context(name)
        wait_until(lambda: not saved(tmp_path))
        wait_until(lambda: not list(tmp_path.rglob("piece-?????.safetensors")))


# --- while the service runs ---


def fill(path: Path) -> None:
    """Makes a file of all the room that there is."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def test_a_full_disk_is_told_once_and_deletions_make_room_on_it(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 12 << 20) as disk,
        serving(tmp_path / "data", url=disk.folder) as (
            service,
            client,
        ),
    ):
        ingest(client, ["first"])
        wait_until(lambda: len(saved(disk.folder)) == 1)
        (first,) = saved(disk.folder)
        fill(disk.folder / "stranger")
        client.ingest("second", f"{BOOK.text[:1000]} {QUESTION}")
        answer, _ = ask(client, "second", QUESTION)
        wait_until(lambda: service.num_said(AWAY) == 2)
        assert "it is full; make room there" in service.said
        client.delete_context("first")
        wait_until(lambda: not first.exists())
        wait_until(lambda: len(saved(disk.folder)) == 1)
        assert ask(client, "second", QUESTION)[0] == answer
        wait_until(lambda: service.num_said(AGAIN) == 2)
        assert service.num_said(AWAY) == 2, "once each"
