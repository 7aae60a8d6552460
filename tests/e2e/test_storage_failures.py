"""Services whose snapshot storage is damaged between runs or fails during a run."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import msgspec
import pytest
from blake3 import blake3

from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig, embedded_model
from longleaf.demo.haystack import make_haystack
from longleaf.launch import coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.storage.envelope import wrap
from longleaf.storage.manifest import KIND, VERSION, decode_manifest
from tests.e2e.test_restart import Service, ask, wait_until
from tests.support import forked
from tests.support.network.switch import Switch, switch
from tests.support.object_store import ObjectStore, object_store
from tests.support.small_disk import fill, small_disk

pytestmark = pytest.mark.timeout(300)
BOOK = make_haystack(7, 1_500, 1, 0)
QUESTION = BOOK.facts[0].question
AGAIN = "succeeded again"
AWAY = "failed, will retry"
NUM_EVENTS = 100
"""Number of events that proves that a stream progresses."""


class LoggedService(Service):
    """A running service with its address and log."""

    address = ""

    @property
    def matching_lines(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def count_lines(self, words: str) -> int:
        return self.matching_lines.count(words)


@contextmanager
def serving(
    data_dir: Path, world_size: int = 1, *, url: str | Path | None = None, quota: int | None = None
) -> Iterator[tuple[LoggedService, Client]]:
    config = EngineConfig(
        model=str(embedded_model()), world_size=world_size, snapshot_url=None if url is None else str(url)
    )
    data = DataConfig(data_dir=str(data_dir), snapshot_quota=quota)
    command = coordinator_command(ServiceConfig(engine=config, port=0, launcher="local", data=data))
    with LoggedService(command, forked.popen) as service:
        service.address = service.wait_ready(120)
        with Client(service.address) as client:
            yield service, client


def saved(folder: Path) -> list[Path]:
    """The folders with manifests, in segment order."""
    found = [path.parent for path in folder.rglob("manifest")]
    return sorted(found, key=lambda path: int(path.parent.name.rpartition("-")[2]))


def ingest(client: Client, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Creates contexts with segments from 0 on; returns their answers."""
    for name in names:
        client.ingest(name, f"{name}. {BOOK.text}")
    return {name: ask(client, name, QUESTION)[0] for name in names}


# --- while no service runs ---


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def first_piece(folder: Path) -> Path:
    return folder / "piece-00000.safetensors"


def add_foreign_files(folder: Path) -> None:
    """Adds files that no service writes."""
    (folder / ".nfs0000000000000001").write_bytes(b"a file that was deleted while somebody read it")
    (folder / ("n" * 255)).write_bytes(b"a huge name")
    (folder / "loop").symlink_to(folder / "loop")


def forge(folder: Path, **fields: object) -> None:
    """Rewrites a manifest with changed fields and a valid checksum."""
    path = folder / "manifest"
    manifest = decode_manifest(path.read_bytes(), "manifest")
    path.write_bytes(wrap(KIND, VERSION, msgspec.msgpack.encode(msgspec.structs.replace(manifest, **fields))))


def forge_first_piece(folder: Path, **fields: object) -> None:
    first, *others = decode_manifest((folder / "manifest").read_bytes(), "manifest").pieces
    forge(folder, pieces=(msgspec.structs.replace(first, **fields), *others))


def forge_positions(folder: Path) -> None:
    """Makes the first piece claim more positions than any memory holds."""
    piece = first_piece(folder)
    content = piece.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"]["positions"] = f"0-{2**60}"
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + content[end:]
    piece.write_bytes(content)
    forge_first_piece(folder, num_bytes=len(content), digest=blake3(content).hexdigest())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(first_piece(folder), 1000),
    "flipped": lambda folder: flip(first_piece(folder)),
    "gone": lambda folder: first_piece(folder).unlink(),
    "of no manifest": lambda folder: (folder / "manifest").unlink(),
    "of a flipped manifest": lambda folder: flip(folder / "manifest"),
    "of too many tokens": lambda folder: forge(folder, num_tokens=2**60),
    "of another service": lambda folder: forge(folder, service="f" * 32),
    "of a negative size": lambda folder: forge_first_piece(folder, num_bytes=-1),
    "of overlapping runs": lambda folder: forge_first_piece(folder, runs=((0, 2**60),)),
    "of too many positions": forge_positions,
    "among foreign files": add_foreign_files,
}


@pytest.mark.extended
def test_damaged_snapshots_are_reported_recomputed_and_saved_again(tmp_path: Path) -> None:
    names = [f"context-{i}" for i in range(len(DAMAGES))]
    with serving(tmp_path, 2) as (service, client):
        before = ingest(client, names)
        wait_until(lambda: len(saved(tmp_path)) == len(names))
        service.kill()
    folders = saved(tmp_path)
    for folder, damage in zip(folders, DAMAGES.values(), strict=True):
        damage(folder)
        add_foreign_files(folder.parent)
    with serving(tmp_path) as (service, client):
        for name, answer in before.items():
            assert ask(client, name, QUESTION) == (answer, True)
        assert service.count_lines("is damaged; recomputing the tokens") == 9
        assert service.count_lines("1 snapshots are missing from") == 1
        wait_until(lambda: len(saved(tmp_path)) == len(names) and not set(folders[:-1]) & set(saved(tmp_path)))
        for name in names:
            client.delete_context(name)
        wait_until(lambda: not saved(tmp_path))
        wait_until(lambda: not list(tmp_path.rglob("piece-?????.safetensors")))


# --- while the service runs ---


def storage_error(client: Client) -> str:
    """The storage error that clients see."""
    storage = client.cluster().storage
    assert storage is not None
    return storage.error


def test_full_disk_is_reported_once_and_deletions_free_space(tmp_path: Path) -> None:
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
        wait_until(lambda: service.count_lines(AWAY) == 2)
        assert "it is full; free space there" in service.matching_lines
        assert "it is full" in storage_error(client)
        client.delete_context("first")
        wait_until(lambda: not first.exists())
        wait_until(lambda: len(saved(disk.folder)) == 1)
        assert ask(client, "second", QUESTION)[0] == answer
        wait_until(lambda: service.count_lines(AGAIN) == 2)
        assert service.count_lines(AWAY) == 2, "once each"
        assert storage_error(client) == ""


@pytest.mark.extended
def test_full_data_disk_accepts_deletions_and_restarts(tmp_path: Path) -> None:
    """Snapshots on the same disk as the catalog leave space for it; the space taken by another program is reserved
    before."""
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        data = disk.folder / "data"
        names = [f"context-{number}" for number in range(40)]
        with serving(data) as (service, client):
            for name in names:
                client.ingest(name, f"{name}. {BOOK.text[:1500]}")
            wait_until(lambda: service.count_lines(AWAY) == 1)
            assert "are reserved for deletions" in storage_error(client)
            num_saved = len(saved(data))
            fill(disk.folder / "stranger")
            client.delete_context(names[0])
            service.kill()
        fill(disk.folder / "another")
        with serving(data) as (service, client):
            for name in names[1:30]:
                client.delete_context(name)
            assert [context.id for context in client.list_contexts()] == sorted(names[30:])
            assert len(saved(data)) < num_saved
            (disk.folder / "stranger").unlink()
            (disk.folder / "another").unlink()
            client.ingest("new", BOOK.text[:1000])
            assert ask(client, "new", QUESTION)[0]


class Objects:
    """The objects of a server, read without the proxy that can be switched off."""

    def __init__(self, store: ObjectStore) -> None:
        self._client = boto3.client("s3", endpoint_url=store.endpoint)
        self._bucket = store.bucket

    @property
    def manifests(self) -> list[str]:
        found = self._client.list_objects_v2(Bucket=self._bucket).get("Contents", [])
        return [each["Key"] for each in found if each["Key"].endswith("/manifest")]


class Reader(threading.Thread):
    """Reads one answer after the other about a context until it is stopped, and counts events."""

    def __init__(self, address: str, context: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._context = context
        self._is_over = threading.Event()
        self.num_events = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                while not self._is_over.is_set():
                    for _ in client.ask(self._context, QUESTION, max_tokens=100, ignore_end_token=True):
                        self.num_events += 1
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self._is_over.set()
        self.join(60)
        assert self.error is None


@contextmanager
def reading(address: str, context: str) -> Iterator[Reader]:
    reader = Reader(address, context)
    reader.start()
    try:
        yield reader
    finally:
        reader.end()


@pytest.mark.extended
@pytest.mark.parametrize(
    "outage", [Switch.refuse, pytest.param(Switch.hang, marks=pytest.mark.slow)], ids=["refuses", "hangs"]
)
def test_unavailable_object_store_delays_no_other_call(tmp_path: Path, outage: Callable[[Switch], None]) -> None:
    """The server returns only after all calls have ended."""
    with object_store() as store, switch(int(store.endpoint.rpartition(":")[2])) as way:
        folder = Objects(store)
        os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{way.port}"  # while the store is reachable
        with serving(tmp_path, url=store.url) as (service, client):
            before = ingest(client, ["evicted", "dropped"])
            wait_until(lambda: len(folder.manifests) == 2)
            service.kill()
        (dropped,) = [name for name in folder.manifests if name.split("/")[-3].endswith("-1")]
        outage(way)
        with serving(tmp_path, url=store.url) as (service, client):
            before |= ingest(client, ["new"])
            client.delete_context("dropped")
            with reading(service.address, "new") as reader:
                num_before = reader.num_events
                assert ask(client, "evicted", QUESTION) == (before["evicted"], True)
                if outage is Switch.hang:  # meanwhile the service waits for its keys, for half a minute
                    assert reader.num_events > num_before + NUM_EVENTS
                wait_until(lambda: service.count_lines(AWAY) == 2, 150)
                assert ask(client, "new", QUESTION)[0] == before["new"]
                num_before = reader.num_events
                wait_until(lambda: reader.num_events > num_before + NUM_EVENTS)
            assert len(folder.manifests) == 2
            way.carry()
            wait_until(lambda: len(folder.manifests) == 2 and dropped not in folder.manifests, 150)
            wait_until(lambda: service.count_lines(AGAIN) == 2, 150)
            assert service.count_lines(AWAY) == 2, "once each"
            outage(way)
            client.ingest("last", f"{BOOK.text[:1000]} {QUESTION}")
        assert service._process.returncode == 0, "no exiting process waits for the storage"


def test_missing_storage_folder_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    with serving(tmp_path / "data", url=folder, quota=1 << 30) as (service, client):
        before = ingest(client, ["book"])
        wait_until(lambda: len(saved(folder)) == 1)
        shutil.rmtree(folder)
        before |= ingest(client, ["other"])
        wait_until(lambda: service.count_lines(AWAY) == 2)
        client.delete_context("book")
        folder.mkdir()
        wait_until(lambda: len(saved(folder)) == 1)
        wait_until(lambda: service.count_lines(AGAIN) == 2)
        assert service.count_lines(AWAY) == 2, "once each"
        assert ask(client, "other", QUESTION)[0] == before["other"]
        service.kill()
    with serving(tmp_path / "data", url=folder) as (service, client):
        assert ask(client, "other", QUESTION) == (before["other"], True)
        assert "recomputing" not in service.matching_lines


@pytest.mark.extended
def test_file_in_place_of_the_storage_folder_is_reported_and_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    with serving(tmp_path / "data", url=folder) as (service, client):
        before = ingest(client, ["book"])
        wait_until(lambda: len(saved(folder)) == 1)
        service.kill()
    shutil.rmtree(folder)
    folder.write_text("no folder")
    with serving(tmp_path / "data", url=folder) as (service, client):
        assert ask(client, "book", QUESTION) == (before["book"], True)
        wait_until(lambda: service.count_lines("garbage collection failed") == 1)
        folder.unlink()
        folder.mkdir()
        wait_until(lambda: len(saved(folder)) == 1, 100)
        assert "1 snapshots are missing from" in service.matching_lines


def test_unwritable_storage_remains_readable(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 32 << 20) as disk:
        with serving(tmp_path / "data", url=disk.folder) as (service, client):
            before = ingest(client, ["book"])
            wait_until(lambda: len(saved(disk.folder)) == 1)
            service.kill()
        disk.make_read_only()
        with serving(tmp_path / "data", url=disk.folder) as (service, client):
            assert ask(client, "book", QUESTION) == (before["book"], True)
            before |= ingest(client, ["other"])
            client.delete_context("book")
            wait_until(lambda: service.count_lines(AWAY) == 2)
            assert "it is read-only; mount it for writing" in service.matching_lines
            assert "recomputing" not in service.matching_lines
            assert ask(client, "other", QUESTION)[0] == before["other"]
