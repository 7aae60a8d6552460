"""Services with one data folder: killed with all their processes and restarted."""

import json
import os
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from longleaf.client import Client
from longleaf.config import DataConfig, DtypeName, EngineConfig, Launcher, embedded_model
from longleaf.demo.haystack import make_haystack
from longleaf.errors import AlreadyExists, CheckpointChanged, NotFound, StartError
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Context, Delta, Finished, IngestProgress, Recovering
from tests.support import forked
from zoo.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(300)
TEMPLATE = "{{ bos_token }}{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"


class Service(ServiceProcess):
    """A service that can be killed with all its processes."""

    def kill(self) -> None:
        main = psutil.Process(self._process.pid)
        everybody = [main, *main.children(recursive=True)]
        for process in everybody:
            with suppress(psutil.NoSuchProcess):  # ranks exit with the process that they were forked from
                process.kill()
        psutil.wait_procs(everybody, timeout=30)
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in everybody)


@contextmanager
def serving(
    data_dir: Path,
    world_size: int = 2,
    *,
    preload: bool = False,
    port: int = 0,
    model: Path | None = None,
    launcher: Launcher = "local",
    dtype: DtypeName = "auto",
) -> Iterator[tuple[Service, Client]]:
    config = EngineConfig(model=str(model or embedded_model()), world_size=world_size, dtype=dtype)
    data = DataConfig(data_dir=str(data_dir), preload=preload)
    command = coordinator_command(ServiceConfig(engine=config, port=port, launcher=launcher, data=data))
    with Service(command, forked.popen) as service, Client(service.wait_ready(120)) as client:
        yield service, client


def ask(client: Client, context: str, question: str) -> tuple[tuple[int, ...], bool]:
    """The ids of an answer, and whether the context was restored for it."""
    ids: tuple[int, ...] = ()
    came_back = False
    for event in client.ask(context, question, max_tokens=24):
        came_back |= isinstance(event, Recovering)
        ids += event.token_ids if isinstance(event, Delta) else ()
    return ids, came_back


def facts(context: Context) -> tuple[object, ...]:
    return context.id, context.tokens, context.display_name, context.is_pinned, context.expires, context.positions


def contents(folder: Path) -> bytes:
    found = b""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):
            found += path.read_bytes()
    return found


def wait_until(is_so: Callable[[], bool], seconds: float = 180.0) -> None:
    """Waits for an effect on storage that follows an acknowledgement with a delay."""
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.parametrize("after", [3, pytest.param(1, marks=pytest.mark.extended)])
def test_acknowledged_contexts_survive_a_restart_with_the_same_answers(tmp_path: Path, after: int) -> None:
    haystack = make_haystack(7, 9_000, 2, 0)
    question = haystack.facts[0].question
    with serving(tmp_path / "data") as (service, client):
        client.ingest("book", haystack.text, display_name="a book", is_pinned=True)
        client.fork_context("book", "twig", num_tokens=5_000)
        client.ingest("twig", " The end.", append=True)
        client.ingest("gone", haystack.text[:5000])
        client.delete_context("gone")
        before = client.list_contexts()
        answers = {name: ask(client, name, question)[0] for name in ("book", "twig")}
        service.kill()
    with serving(tmp_path / "data", after) as (service, client):
        found = client.list_contexts()
        assert list(map(facts, found)) == list(map(facts, before))
        assert {context.state for context in found} == {"evicted"}
        for name, answer in answers.items():
            assert ask(client, name, question) == (answer, True)
        client.delete_context("book")
        service.kill()
    with serving(tmp_path / "data", preload=True) as (_, client):
        (context,) = client.list_contexts()
        assert context.id == "twig"
        assert context.state in {"restoring", "resident"}
        assert ask(client, "twig", question)[0] == answers["twig"]


@pytest.mark.extended
def test_recurrent_states_survive_a_restart_with_the_same_answers(tmp_path: Path) -> None:
    """Of Mamba-2 layers: on three ranks after two, and on one after the context has grown."""
    model = make_checkpoint(tmp_path / "model", "granitemoehybrid", chat_template=TEMPLATE)
    text = make_haystack(7, 6_000, 2, 0).text
    with serving(tmp_path / "data", model=model) as (service, client):
        for start in (0, 2_000):
            client.ingest("book", text[start : start + 2_000], append=start > 0)
        answer, _ = ask(client, "book", "Why?")
        wait_until(lambda: client.get_context("book").storage_bytes > 0)
        service.kill()
    with serving(tmp_path / "data", 3, model=model) as (service, client):
        assert client.get_context("book").state == "evicted"
        assert ask(client, "book", "Why?") == (answer, True)
        client.ingest("book", text[4_000:], append=True)
        longer, _ = ask(client, "book", "Why?")
        service.kill()
    with serving(tmp_path / "data", 1, model=model) as (_, client):
        assert ask(client, "book", "Why?") == (longer, True)
        assert client.cluster().states > 0


def test_data_folder_accepts_one_service_and_one_user(tmp_path: Path) -> None:
    data_dir = tmp_path / "some" / "data"
    with serving(data_dir, 1) as (service, client):
        client.ingest("book", "a short text")
        message = f"in use by process {service._process.pid} on .*, serving 127.0.0.1:"
        with pytest.raises(StartError, match=message), serving(data_dir, 1):
            pass
        modes = {path: path.stat().st_mode & 0o777 for path in [data_dir, *data_dir.rglob("*")]}
        assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
        assert {mode for path, mode in modes.items() if not path.is_dir()} == {0o600}
        service.kill()
    with serving(data_dir, 1) as (_, client):
        assert [context.id for context in client.list_contexts()] == ["book"]


def test_deleted_text_is_erased_from_the_disk(tmp_path: Path) -> None:
    ids = [random.Random(5).randrange(3, 200) for _ in range(3_000)]
    needle = struct.pack("<40I", *ids[1_000:1_040])
    text = "What is deleted must not be found by anybody who looks at the disk."
    with serving(tmp_path, 1) as (service, client):
        client.ingest("book", ids)
        client.ingest("other", [3, 4, 5])
        assert isinstance(list(client.ask("book", text, max_tokens=4, request_id="held", resumable=True))[-1], Finished)
        assert needle in contents(tmp_path)
        assert list(tmp_path.rglob("*.journal"))
        client.delete_context("book")
        assert not list(tmp_path.rglob("*.journal"))
        wait_until(lambda: needle not in contents(tmp_path))
        service.kill()
    assert needle not in contents(tmp_path)


def test_resumable_answer_continues_in_the_next_service(tmp_path: Path) -> None:
    options = {"max_tokens": 200, "temperature": 0.8, "seed": 11, "ignore_end_token": True}
    question, reported = "How was it?", list[Delta]()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(tmp_path, 2, port=port) as (service, client):
        client.ingest("book", "It was the best of times, it was the worst of times. " * 40)
        whole = [event for event in client.ask("book", question, **options) if isinstance(event, Delta)]  # type: ignore[arg-type]
        with Client(f"127.0.0.1:{port}") as reader:
            stream = reader.ask("book", question, request_id="mine", resumable=True, **options)  # type: ignore[arg-type]
            while len(reported) < 20:
                reported += [event for event in [next(stream)] if isinstance(event, Delta)]
            service.kill()
            with serving(tmp_path, 1, port=port) as (_, client):
                reported += [event for event in stream if isinstance(event, Delta)]
                assert [delta.index for delta in reported] == sorted({delta.index for delta in reported})
                ids = [token for delta in reported for token in delta.token_ids]
                assert ids == [token for delta in whole for token in delta.token_ids]
                assert "".join(delta.text for delta in reported) == "".join(delta.text for delta in whole)
                client.cancel_generation("mine")
                assert not list(tmp_path.rglob("*.journal"))


@pytest.mark.extended
def test_interrupted_upload_continues_in_the_next_service(tmp_path: Path) -> None:
    text = make_haystack(3, 180_000, 1, 0).text.encode()
    sent = threading.Event()

    def half() -> Iterator[bytes]:
        yield text[: len(text) // 2]
        sent.set()
        threading.Event().wait(30)

    with serving(tmp_path, 1) as (service, client):
        reader = threading.Thread(target=_ignore, args=(client.ingest, "book", half()), daemon=True)
        reader.start()
        assert sent.wait(60)
        wait_until(lambda: b"mine" in contents(tmp_path))
        service.kill()
    with serving(tmp_path, 1) as (_, client):
        reports: list[IngestProgress] = []
        found = client.ingest("book", text, upload_id="mine", on_progress=reports.append)
        assert 0 < reports[0].received_bytes <= len(text) // 2
        again = client.ingest("book", text, upload_id="mine")
        assert (again.tokens, again.created) == (found.tokens, found.created)
        assert found.tokens == client.count_tokens(text.decode()) + client.ingest("empty", "x").tokens - 1


def _ignore(ingest: Callable[..., Context], name: str, document: Iterator[bytes]) -> None:
    with suppress(Exception):
        ingest(name, document, upload_id="mine")


def test_contexts_of_another_checkpoint_are_reported_as_stale(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model(), model)
    data_dir = tmp_path / "data"
    with serving(data_dir, 1, model=model) as (_, client):
        client.ingest("book", "a short text")
    settings = json.loads((model / "tokenizer_config.json").read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"changed": True}))
    with serving(data_dir, 1, model=model) as (_, client):
        assert client.list_contexts() == []
        with pytest.raises(CheckpointChanged, match=r"tokenizer_config\.json in .* changed after"):
            ask(client, "book", "?")
        with pytest.raises(CheckpointChanged, match=r"tokenizer_config\.json in .* ingest the text again"):
            client.recompute_context("book")
        with pytest.raises(NotFound):
            client.recompute_context("other")
        with pytest.raises(NotFound):
            client.get_context("other")
        client.ingest("book", "another text")
        assert client.get_context("book").state == "resident"


def change_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: each + 0.5 * each.std() * torch.randn(each.shape, generator=generator) for name, each in weights.items()
    }
    save_file(changed, model / "model.safetensors", {"format": "pt"})


@pytest.mark.extended
def test_stale_contexts_are_recomputed_with_the_new_weights(tmp_path: Path) -> None:
    model, data_dir = tmp_path / "model", tmp_path / "data"
    shutil.copytree(embedded_model(), model)
    haystack = make_haystack(7, 4_000, 2, 0)
    question = haystack.facts[0].question
    with serving(data_dir, model=model, dtype="float32") as (_, client):
        client.ingest("book", haystack.text, display_name="a book")
        client.fork_context("book", "twig", num_tokens=2_000)
        before = ask(client, "book", question)[0]
        tokens = client.get_context("book").tokens
    change_weights(model)
    with serving(data_dir, model=model, dtype="float32") as (service, client):
        for call in (lambda: ask(client, "book", question), lambda: client.get_context("book")):
            with pytest.raises(CheckpointChanged, match=r"model\.safetensors in .* changed after.*contexts recompute"):
                call()
        context = client.recompute_context("book")
        assert (context.tokens, context.state, context.display_name) == (tokens, "evicted", "a book")
        with pytest.raises(AlreadyExists):
            client.recompute_context("book")
        client.ingest("fresh", haystack.text)
        answer, came_back = ask(client, "book", question)
        assert came_back
        assert answer == ask(client, "fresh", question)[0] != before
        client.delete_context("fresh")
        service.kill()
    with serving(data_dir, 3, model=model, dtype="float32") as (_, client):
        assert ask(client, "book", question) == (answer, True)
        found = client.recompute_contexts()
        assert [each.id for each in found.contexts] == ["twig"]
        assert [each.name for each in found.skipped] == ["book"]
        assert ask(client, "twig", "?")[1]
    shutil.copy(embedded_model() / "model.safetensors", model)
    with serving(data_dir, model=model, dtype="float32") as (_, client):
        assert ask(client, "book", question) == (before, True), "the data for these weights is unchanged"


@pytest.mark.extended
@pytest.mark.ray
def test_lost_coordinator_ends_the_service_with_advice_to_resume(tmp_path: Path) -> None:
    haystack = make_haystack(7, 9_000, 2, 0)
    with serving(tmp_path, launcher="ray") as (service, client):
        client.ingest("book", haystack.text)
        answer, _ = ask(client, "book", haystack.facts[0].question)
        processes = psutil.Process(service._process.pid).children(recursive=True)
        (coordinator,) = [one for one in processes if "ray::CoordinatorActor" in one.name() + "".join(one.cmdline())]
        coordinator.kill()
        assert service._process.wait(60) == 1
        assert f"start the service again with --data-dir {tmp_path}" in service._tail()
    with serving(tmp_path, 3, launcher="ray") as (_, client):
        assert ask(client, "book", haystack.facts[0].question) == (answer, True)


def test_stopping_service_lists_what_it_persisted(tmp_path: Path) -> None:
    reports: list[IngestProgress] = []
    with serving(tmp_path, 1) as (_, client):
        client.ingest("book", "a short text", on_progress=reports.append)
    assert reports[-1].phase == "ready"
    with serving(tmp_path, 1) as (service, _):
        assert " has 1 context, " in service._tail()
    assert os.listdir(tmp_path)
