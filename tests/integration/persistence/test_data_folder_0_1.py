"""A data folder that a killed service of version 0.1.0 left, and archives of it: this version opens both.

tests/fixtures/data_folder_0_1/make.py describes how they were made. Each test uses a copy.
"""

import json
import shutil
import struct
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.engine_messages import Admitted, Ended, Tokens
from coordinator.handlers.durable_uploads import UploadState
from coordinator.persistence.catalog.catalog import read_only_catalog
from coordinator.persistence.journal.entries import GenerationEntry
from longleaf.client import Client
from longleaf.config import DataConfig, EngineConfig
from longleaf.context_archive.frames import FRAME_BYTES, PREAMBLE, Frame
from longleaf.context_archive.records import ContextHead, SegmentHead
from longleaf.errors import InvalidArgument
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig, TelemetryConfig
from longleaf.storage.context_note import decode_note, encode_note
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.names import place_of_note
from longleaf.types import Delta, ImportProgress, IngestProgress
from tests.support import forked
from tests.support.scraping import Scraped

pytestmark = pytest.mark.timeout(120)
FIXTURE = Path(__file__).parents[2] / "fixtures" / "data_folder_0_1"
JOURNAL_TYPES = (GenerationEntry, Admitted, Tokens, Ended)
"""By the first byte of an entry."""
ARCHIVE_TYPES = {"head": ContextHead, "segment": SegmentHead}
ENVELOPE_BYTES = 52
"""Bytes of a manifest or note before its content."""
GOLDEN: dict[str, Any] = json.loads((FIXTURE / "golden.json").read_bytes())


class Served:
    """A client of a service, and the metrics of the service."""

    def __init__(self, client: Client, metrics_url: str) -> None:
        self.client = client
        self._metrics_url = metrics_url

    @property
    def num_recomputed(self) -> float:
        """Tokens whose keys and values were recomputed."""
        with urllib.request.urlopen(self._metrics_url) as answer:
            return Scraped(answer.read().decode()).value("longleaf_recomputed_tokens_total")

    def text(self, name: str) -> str:
        return self.client.get_context_text(name, 0, self.client.get_context(name).tokens).text

    def ask(self, name: str) -> list[int]:
        events = list(self.client.ask(name, GOLDEN["question"], **GOLDEN["options"]))
        return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A service of one rank on `folder`/data and `folder`/snapshots; the fixture was made by two ranks."""
    urls = {"model": str(FIXTURE / "model"), "snapshot_url": str(folder / "snapshots")}
    command = coordinator_command(
        ServiceConfig(
            engine=EngineConfig(**urls, world_size=1, block_size=16, kv_bytes=1 << 22),
            port=0,
            launcher="local",
            data=DataConfig(data_dir=str(folder / "data")),
            telemetry=TelemetryConfig(metrics_port=0),
        )
    )
    with ServiceProcess(command, forked.popen) as service, Client(service.wait_ready(60)) as client:
        service._log.seek(0)
        (line,) = [line for line in service._log if "metrics are at" in line]
        yield Served(client, line.split("metrics are at ")[1].strip())


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    for name in ("data", "snapshots"):
        shutil.copytree(FIXTURE / name, folder / name, copy_function=shutil.copyfile)
    return folder


@pytest.fixture(scope="module")
def opened(copied: Path) -> Iterator[Served]:
    with serving(copied) as served:
        yield served


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service without contexts."""
    with serving(tmp_path_factory.mktemp("empty")) as served:
        yield served


def test_contexts_are_listed_with_their_settings_and_texts(opened: Served) -> None:
    found = {context.id: context for context in opened.client.list_contexts()}
    assert found.keys() == GOLDEN["contexts"].keys()
    for name, expected in GOLDEN["contexts"].items():
        assert {field: getattr(found[name], field) for field in expected if field != "text"} == {
            field: value for field, value in expected.items() if field != "text"
        }
        if expected["text"] is not None:
            assert opened.text(name) == expected["text"]
    assert all(context.storage_bytes > 0 for context in found.values())


@pytest.mark.parametrize("name", GOLDEN["answers"])
def test_context_restored_from_a_snapshot_gives_the_same_answer(opened: Served, name: str) -> None:
    before = opened.num_recomputed
    assert opened.ask(name) == GOLDEN["answers"][name]
    assert opened.num_recomputed == before, "its keys and values come from the snapshots"


@pytest.mark.parametrize("name", GOLDEN["journal"])
def test_unfinished_generation_continues_from_the_journal(opened: Served, name: str) -> None:
    options = dict(GOLDEN["started"][name])
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    found: list[list[int]] = [[] for _ in range(options.get("num_samples", 1))]
    logprobs = list[Any]()
    question, context = options.pop("input"), options.pop("context")
    with pytest.raises(InvalidArgument, match="is in use by another request"):
        list(opened.client.generate(question + "?", context=context, request_id=name, resumable=True, **options))
    for event in opened.client.generate(question, context=context, request_id=name, resumable=True, **options):
        if isinstance(event, Delta):
            found[event.sample] += event.token_ids
            logprobs += event.logprobs
    assert found == GOLDEN["long"][name]
    assert len(logprobs) == (sum(map(len, found)) if "num_logprobs" in options else 0)
    assert all(len(each.top) == options["num_logprobs"] for each in logprobs)
    opened.client.cancel_generation(name)


def test_half_sent_upload_continues(opened: Served) -> None:
    upload = GOLDEN["started"]["upload"]
    text = "".join(f"{i}:{' ' * upload['spaces']}" for i in range(upload["lines"]))
    options = {"upload_id": upload["upload_id"], "display_name": upload["display_name"]}
    reports = list[IngestProgress]()
    context = opened.client.ingest("upload", text, on_progress=reports.append, **options)
    assert 60_000 < reports[0].received_bytes <= upload["sent"]
    fresh = opened.client.ingest("fresh", text)
    assert (context.tokens, context.display_name) == (fresh.tokens, "half")
    assert opened.text("upload") == text
    assert opened.ask("upload") == opened.ask("fresh")


def test_outbox_is_sent(copied: Path, opened: Served) -> None:
    """The service of the fixture could not write the first note of the context `later`."""
    name, num_tokens = first_note_of_later(), GOLDEN["contexts"]["later"]["tokens"]
    path = copied / "snapshots" / name
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, "the note is not written"
        time.sleep(0.05)
    place = place_of_note(name)
    assert place is not None
    record = decode_note(path.read_bytes(), place).record
    assert record is not None
    assert record.num_tokens == num_tokens
    assert opened.client.get_context("later").tokens == num_tokens


def first_note_of_later() -> str:
    (service,) = [path.name for path in (FIXTURE / "snapshots" / "services").iterdir()]
    name = f"services/{service}/notes/later/{6:020}"
    assert not (FIXTURE / "snapshots" / name).exists()
    return name


@pytest.mark.parametrize("has_keys", [True, False])
def test_archive_is_imported(empty: Served, has_keys: bool) -> None:
    name = "with_keys" if has_keys else "without_keys"
    reports, before = list[ImportProgress](), empty.num_recomputed
    context = empty.client.import_context(FIXTURE / f"{name}.context", name, on_progress=reports.append)
    expected = GOLDEN["contexts"]["book"]
    assert (context.tokens, context.display_name) == (expected["tokens"], expected["display_name"])
    assert reports[-1].key_tokens == (context.tokens if has_keys else 0)
    assert empty.text(name) == expected["text"]
    assert empty.ask(name) == GOLDEN["answers"]["book"]
    assert empty.num_recomputed - before == (0 if has_keys else context.tokens)


def persisted_records() -> Iterator[Any]:
    """Records of the fixture as they are stored, each with the type that decodes it."""
    for path in FIXTURE.glob("data/*/journal/*"):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack_from("<I", content)
            entry, content = content[8 : 8 + size], content[8 + size :]
            yield pytest.param(entry[1:], JOURNAL_TYPES[entry[0]], id=f"journal-{JOURNAL_TYPES[entry[0]].__name__}")
    for path in sorted(FIXTURE.glob("snapshots/**/manifest")):
        yield pytest.param(path.read_bytes()[ENVELOPE_BYTES:], SegmentManifest, id="SegmentManifest")
    for path in sorted(FIXTURE.glob("*.context")):
        content = path.read_bytes()[len(PREAMBLE) :]
        while content:
            frame = Frame.decode(content[:FRAME_BYTES])
            record, content = content[FRAME_BYTES:][: frame.num_bytes], content[FRAME_BYTES + frame.num_bytes :]
            if frame.kind in ARCHIVE_TYPES:
                yield pytest.param(record, ARCHIVE_TYPES[frame.kind], id=f"{path.stem}-{frame.kind}")


def distinct(records: Iterable[Any]) -> list[Any]:
    """The first record of each id."""
    return list({record.id: record for record in reversed(list(records))}.values())


@pytest.mark.parametrize(("content", "kind"), distinct(persisted_records()))
def test_every_field_of_a_persisted_record_is_read(content: bytes, kind: Any) -> None:
    """A field under a new name would be read as its default."""
    check_fields(msgspec.msgpack.decode(content), kind)


@pytest.mark.parametrize("path", sorted(FIXTURE.glob("snapshots/**/" + "0" * 17 + "*")), ids=lambda path: path.name)
def test_notes_are_written_as_they_were(path: Path) -> None:
    place = place_of_note(str(path.relative_to(FIXTURE / "snapshots")))
    assert place is not None
    assert encode_note(decode_note(path.read_bytes(), place)) == path.read_bytes()


def test_every_field_of_a_half_sent_upload_is_read(tmp_path: Path) -> None:
    (folder,) = (FIXTURE / "data").iterdir()
    for path in folder.glob("catalog.db*"):
        shutil.copyfile(path, tmp_path / path.name)
    (upload,) = read_only_catalog(tmp_path).uploads
    check_fields(msgspec.msgpack.decode(upload.header), UploadState)


def check_fields(stored: dict[str, Any], kind: Any) -> None:
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.convert(stored, kind)))
    assert lost_fields(stored, read) == []


def lost_fields(stored: Any, read: Any, path: str = "") -> list[str]:
    """Paths of the stored values that are missing or different in `read`."""
    if isinstance(stored, dict) and isinstance(read, dict):
        absent = object()
        pairs = [(f"{path}.{name}", value, read.get(name, absent)) for name, value in stored.items()]
    elif isinstance(stored, list) and isinstance(read, list) and len(stored) == len(read):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(stored, read, strict=True))]
    else:
        return [] if stored == read else [path]
    return [lost for each, one, other in pairs for lost in lost_fields(one, other, each)]
