"""The command line: output, exit codes, and a start without torch."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from typer.main import get_command

from longleaf.cli import app
from longleaf.cli.cluster import (
    drafting_lines,
    headlines,
    lines_of,
    merge_lines,
    storage_lines,
    to_json,
    workers_table,
)
from longleaf.cli.ingest import summary
from longleaf.client import Client
from longleaf.config import EngineConfig, default_server, with_port
from longleaf.errors import (
    AlreadyExists,
    InvalidArgument,
    LongleafError,
    NotFound,
    RankLost,
    ResourceExhausted,
    StartError,
    Unavailable,
)
from longleaf.launch import coordinator_command
from longleaf.options import config_from_argument
from longleaf.positions import UNLIMITED_TOKENS
from longleaf.rank_protocol.group_messages import MergeTiming, TierMerge
from longleaf.service_settings import HttpConfig, ServiceConfig
from longleaf.types import Cluster, Context, Drafting, ModelInfo, RankShare, Recovery, Storage, Worker
from tests.support.terminal import Terminal

TAKEN = (
    "there is already a context named moby: append to it (`longleaf ingest --append`), delete it (`longleaf contexts "
    "delete moby`), or use another name"
)


async def test_context_is_ingested_queried_listed_and_deleted(terminal: Terminal, book: str) -> None:
    code, out, err = await terminal.run("ingest", book, "--name", "moby")
    assert (code, out.strip()) == (0, "moby: 172 tokens, 10.8 KiB of keys and values on 1 rank")
    assert "100%" in err
    code, out, err = await terminal.run("ask", "moby", "who?")
    assert (code, out) == (0, "Grüße\n")
    assert "[cut off after 7 tokens (--max-tokens); first token after " in err and "; exact]" in err
    assert "moby" in (await terminal.run("contexts", "list"))[1]
    assert "172 tokens" in (await terminal.run("contexts", "show", "moby"))[1]
    assert (await terminal.run("contexts", "delete", "moby"))[0] == 0
    assert terminal.engine.contexts == {}


async def test_json_is_one_object_per_answer(terminal: Terminal, book: str) -> None:
    [context] = await terminal.json("ingest", book, "--name", "moby")
    assert (context["id"], context["tokens"]) == ("moby", 172)
    [context] = await terminal.json("ingest", book, "--name", "moby", "--append")
    assert context["tokens"] == 342
    [listed] = await terminal.json("contexts", "list")
    assert listed["contexts"] == [context]
    assert await terminal.json("contexts", "show", "moby") == [context]
    [cluster] = await terminal.json("cluster")
    assert cluster["workers"][0]["pid"] == 4711
    assert await terminal.json("contexts", "delete", "moby") == [{"deleted": "moby"}]


async def test_the_cluster_is_a_table(terminal: Terminal) -> None:
    _, out, _ = await terminal.run("cluster")
    assert all(word in out for word in ("rank", "pid", "4711", "cpu", "1,048,576"))
    assert "merge" not in out, "one rank has nothing to merge"


def test_cluster_reports_replicated_windows() -> None:
    shape = {"model": ModelInfo(name="m"), "workers": (), "world_size": 1, "epoch": 1, "merge": "auto"}
    found = Cluster(**shape, launcher="local", window_keys="replicated", window_tokens=96, max_window_tokens=4096)
    assert "keys of windowed layers on every rank, 96 of 4,096 tokens" in headlines(found)


def test_cluster_reports_recurrent_states() -> None:
    worker = Worker(rank=0, node="n", pid=1, device="cpu", tokens=0, max_tokens=4096, kv_bytes=0)
    shape = {"model": ModelInfo(name="m"), "workers": (worker,), "world_size": 1, "epoch": 1, "merge": "auto"}
    found = Cluster(**shape, launcher="local", states=96, max_states=1024, state_bytes=36_864)
    assert "recurrent states on every rank, 96 of 1,024, 36.0 KiB each" in headlines(found)
    answer = json.loads(msgspec.json.encode(to_json(found)))
    assert (answer["states"], answer["max_states"], answer["state_bytes"]) == (96, 1024, 36_864)
    hidden = replace(found, workers=(replace(worker, pid=0),))
    assert "recurrent states on every rank, 1,024, 36.0 KiB each" in headlines(hidden)
    assert json.loads(msgspec.json.encode(to_json(hidden)))["states"] is None


def test_draft_acceptance_is_reported_if_there_were_drafts() -> None:
    nothing = Drafting(drafted_tokens=0, accepted_tokens=0, tokens_per_step=1)
    assert [drafting_lines(each) for each in (None, nothing)] == [[], []]
    drafting = Drafting(drafted_tokens=5678, accepted_tokens=1234, tokens_per_step=2.345)
    assert drafting_lines(drafting) == ["1,234 of 5,678 drafted tokens accepted, 2.35 tokens a step"]


async def test_cluster_reports_draft_acceptance(terminal: Terminal) -> None:
    terminal.engine.drafting = Drafting(drafted_tokens=9, accepted_tokens=6, tokens_per_step=1.5)
    _, out, _ = await terminal.run("cluster")
    assert "6 of 9 drafted tokens accepted, 1.50 tokens a step" in out.splitlines()
    [answer] = await terminal.json("cluster")
    assert answer["drafting"] == {"drafted_tokens": 9, "accepted_tokens": 6, "tokens_per_step": 1.5}


def test_cluster_reports_the_storage() -> None:
    assert storage_lines(None) == ["contexts are lost when the service ends: it has no --data-dir"]
    storage = Storage(snapshots="seal", url="s3://bucket")
    assert storage_lines(storage) == ["snapshots seal, storage s3://bucket"]
    message = "  storage cannot be written: s3://bucket cannot be written: it is full"
    assert storage_lines(replace(storage, error="s3://bucket cannot be written: it is full"))[1:] == [message]


def test_window_only_models_report_no_token_limit() -> None:
    worker = Worker(rank=0, node="n", pid=1, device="cpu", tokens=1536, max_tokens=UNLIMITED_TOKENS, kv_bytes=0)
    shape = {"model": ModelInfo(name="m"), "world_size": 1, "epoch": 1, "merge": "auto", "launcher": "local"}
    cells = [list(column.cells) for column in workers_table(Cluster(**shape, workers=(worker,))).columns]
    assert cells[5:7] == [["1,536"], ["no limit"]]


def test_values_hidden_from_users_are_marked_hidden() -> None:
    worker = Worker(rank=0, node="n", pid=0, device="cpu", tokens=0, max_tokens=4096, kv_bytes=0)
    shape = {"model": ModelInfo(name="m"), "world_size": 1, "epoch": 1, "merge": "auto", "launcher": "local"}
    recovery = Recovery(epoch=2, lost_tokens=0, recovered_tokens=0, seconds=9.0, is_done=False)
    storage = Storage(snapshots="seal", url="")
    found = Cluster(**shape, workers=(worker,), recovery=recovery, storage=storage)
    lines = lines_of(found, 0.0)
    assert "snapshots seal" in lines and "recovering: 9 s" in lines
    assert not any("running" in line for line in lines)
    cells = [list(column.cells) for column in workers_table(found).columns]
    assert cells[2] == cells[5] == cells[7] == ["hidden"]
    answer = json.loads(msgspec.json.encode(to_json(found)))
    assert (
        answer["running"] is answer["waiting"] is answer["storage"]["url"] is answer["recovery"]["lost_tokens"] is None
    )
    [rank] = answer["workers"]
    assert (rank["pid"], rank["tokens"], rank["kv_bytes"], rank["max_tokens"]) == (None, None, None, 4096)
    assert to_json(replace(found, workers=(replace(worker, pid=1),))) != answer


def test_number_of_ranks_of_a_context_is_shown_only_if_known() -> None:
    context = Context(id="book", tokens=7, kv_bytes=64, created=0.0, updated=0.0)
    assert summary(context) == "book: 7 tokens, 64 B of keys and values"
    shares = (RankShare(rank=0, tokens=7, kv_bytes=64),)
    assert summary(replace(context, shares=shares)) == "book: 7 tokens, 64 B of keys and values on 1 rank"


async def test_the_cluster_is_watched_as_lines_of_json(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(Path(sys.executable).with_name("longleaf")), "cluster", "--watch", "--interval", "0.01", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, "--server", terminal.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for running in (3, 7):
        assert json.loads(await process.stdout.readline())["running"] == running
        terminal.engine.running = 7
        terminal.engine.changes.record()
    terminal.engine.error = Unavailable("the service is stopping")
    terminal.engine.changes.close()
    assert (await process.stderr.read()).decode() == "error: the service is stopping\n"
    assert await process.wait() == 1


async def test_the_cluster_is_watched_as_a_live_table(terminal: Terminal) -> None:
    watching = asyncio.create_task(terminal.run("cluster", "--watch", "--interval", "0.01"))
    await terminal.engine.looked.wait()
    terminal.engine.error = Unavailable("the service is stopping")
    terminal.engine.changes.close()
    code, out, err = await watching
    assert (code, err) == (1, "error: the service is stopping\n")
    assert all(word in out for word in ("3 running, 2 waiting", "rank", "4711"))


def test_merge_choice_is_reported_with_timings() -> None:
    cluster = Cluster(
        model=ModelInfo(name="m"),
        workers=(),
        world_size=2,
        epoch=1,
        launcher="ray",
        merge="auto",
        transport="gloo",
        merge_timings=(MergeTiming(8, "gather", {"paper": 1234.5, "gather": 71.2}),),
    )
    assert merge_lines(cluster) == [
        "merge auto over gloo",
        "  up to 8 rows: gather (microseconds: gather 71, paper 1,234)",
    ]


def test_merges_inside_and_between_nodes_are_reported() -> None:
    nothing = {"tokens": 0, "max_tokens": 0, "kv_bytes": 0}
    workers = tuple(
        Worker(**nothing, rank=rank, node="ab"[rank // 2], address=f"10.0.0.{rank // 2}", pid=1, device="cpu")
        for rank in range(3)
    )
    cluster = Cluster(
        model=ModelInfo(name="m"),
        workers=workers,
        world_size=3,
        epoch=1,
        launcher="ray",
        merge="auto",
        transport="shared_memory + gloo",
        intra_node_transport="shared_memory",
        inter_node_transport="gloo",
        tier_merges=(TierMerge(8, "exchange", "gather"), TierMerge(0, "", "packed")),
    )
    assert merge_lines(cluster) == [
        "merge auto over shared_memory + gloo",
        "  shared_memory inside nodes, gloo between 2 nodes: 2 + 1 ranks = 3",
        "  up to 8 rows: exchange inside nodes, then gather between them",
        "  any number of rows: packed over all ranks at once",
    ]
    assert [list(column.cells) for column in workers_table(cluster).columns][2] == ["10.0.0.0", "10.0.0.0", "10.0.0.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "none", "who?"], "there is no context named none; `longleaf contexts list` lists all contexts"),
        (["ask", "No Name", "who?"], "context: "),
        (["ask", "moby", ""], "text: the question is empty"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "--temperature: must be"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: must be"),
        (["generate", "--prompt", "x", "--min-p", "2"], "--min-p: must be"),
        (["generate", "--prompt", "x", "--samples", "99"], "--samples: must be"),
        (["generate", "--prompt", "x", "--logprobs", "-1"], "--logprobs: must be"),
        (["generate", "--prompt", "x", "--logit-bias", "7"], "--logit-bias: 7 is not ID=BIAS"),
        (["generate", "--prompt", "x", "--timeout", "0"], "--timeout: must be above 0"),
        (["generate", "--prompt", "x", "--timeout", "nan"], "--timeout: must be above 0"),
        (["contexts", "fork", "moby", "Ishmael!"], "new_name: "),
        (["contexts", "update", "moby", "--ttl", "5", "--forever"], "--ttl: cannot be given together with --forever"),
        (["ingest", "/dev/null", "--name", "No Name"], "--name: 'No Name' is not a valid context name: "),
        (["contexts", "fork", "none", "new"], "no context named none"),
        (["contexts", "update", "moby"], "give --display-name, --ttl"),
        (["contexts", "update", "moby", "--ttl", "-1"], "--ttl: "),
        (["contexts", "update", "moby", "--display-name", "x" * 300], "--display-name: has 300"),
        (["detokenize", "99999"], "token_ids.ids[0]"),
        (["contexts", "fork", "moby", "new", "--tokens", str(2**70)], "--tokens: "),
        (["cluster", "--watch", "--interval", "0"], "--interval: "),
        (["ingest", "/nowhere/to/be/found", "--name", "x"], "/nowhere/to/be/found"),
        (["ingest", "/dev/null", "/dev/null"], "--name: is required with several files"),
        (["ingest", "-"], "--name: is required for standard input"),
        (["ingest", "/dev/null", "--append"], "--name: is required with --append"),
        (["ingest", "/dev/null", "--name", "x", "--encoding", "rot13"], "--encoding: 'rot13' is not a known charset"),
        (["ingest", "/dev/null", "--name", "x"], "/dev/null: the document is empty"),
        (["contexts", "show", "none"], "no context named none"),
        (["ingest", str(Path(__file__)), "--name", "moby"], TAKEN),
        (["contexts", "fork", "moby", "moby"], TAKEN),
    ],
)
async def test_bad_input_is_one_line_and_exit_code_2(terminal: Terminal, arguments: list[str], message: str) -> None:
    terminal.engine.contexts["moby"] = [1]
    code, out, err = await terminal.run(*arguments, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


async def test_invalid_utf8_is_refused_with_its_offset(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"ab\xff")
    code, _, err = await terminal.run("ingest", str(tmp_path / "bad"), "--name", "x")
    assert code == 2
    assert err.strip() == f"error: {tmp_path / 'bad'}: is not UTF-8 at byte 2: invalid start byte"
    for name, content in (("one", b"text"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in ("one", "empty", "bad")]
    code, _, err = await terminal.run("ingest", *files, "--name", "x")
    message = f"{files[1]} is empty\nerror: {files[2]}: is not UTF-8 at byte 2: invalid start byte"
    assert (code, err.strip()) == (2, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "0"), "--max-tokens: must be between 1 and 1,048,576"),
        (("--max-tokens", str(10**14)), "--max-tokens: must be between 1 and 1,048,576"),
        (("--seed", "-1"), "--seed: must be between 0 and 2^64 - 1"),
        (("--temperature", "-1"), "--temperature: must be between 0 and 100"),
    ],
)
async def test_invalid_options_are_reported_with_name_and_limits(
    terminal: Terminal, options: tuple[str, str], message: str
) -> None:
    code, _, err = await terminal.run("generate", "--prompt", "x", *options)
    assert (code, err) == (2, f"error: {message}\n")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app.main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"longleaf \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_empty_server_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLEAF_SERVER", "")
    assert default_server() == "localhost:50051"


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ("localhost", "localhost:50051"),
        ("node-1.my_net", "node-1.my_net:50051"),
        ("[::1]", "[::1]:50051"),
        ("localhost:80", "localhost:80"),
        ("[::1]:80", "[::1]:80"),
        ("unix:/run/socket", "unix:/run/socket"),
        ("dns:///host", "dns:///host"),
    ],
)
def test_a_server_without_a_port_has_the_default_one(server: str, address: str) -> None:
    assert with_port(server) == address


def test_web_address_is_refused_as_a_server() -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidArgument, match=r"server: http://localhost:1 is not HOST:PORT"):
        Client("http://localhost:1")
    assert set(threading.enumerate()) <= before


async def test_long_time_limits_are_accepted(terminal: Terminal) -> None:
    for limit in ("inf", "1e300", "1e10"):
        assert await terminal.json("generate", "--prompt", "x", "--timeout", limit)


def test_unreachable_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app.main(["cluster", "--server", "127.0.0.1:1"])
    assert end.value.code == 1
    *retries, error = capsys.readouterr().err.splitlines()
    assert len(retries) == 1, "the reason is printed once"
    assert retries[0].startswith("retrying in ")
    assert error == "error: nothing listens on 127.0.0.1:1: start `longleaf serve`, or give another --server"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("a", "b"), 2),
        (NotFound("a"), 2),
        (AlreadyExists("a"), 2),
        (StartError("a"), 2),
        (Unavailable("a"), 1),
        (RankLost(1, "a"), 1),
        (ResourceExhausted("a", "b"), 1),
        (ResourceExhausted("quotas/generations", "2 run", 2.0), 1),
        (ResourceExhausted("quotas/generations", "the tenant may run no generations"), 2),
        (LongleafError("a"), 1),
    ],
)
def test_exit_codes(error: LongleafError, code: int) -> None:
    assert app.exit_code(error) == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world-size", "0"],
        ["--model", "/nowhere"],
        ["--port", "70000"],
        ["--window-bytes", "4096"],
        ["--max-waiting", "0"],
        ["--max-draft-tokens", "-1"],
        ["--max-draft-tokens", "32"],
    ],
)
def test_serve_refuses_invalid_options_immediately(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app.main(["serve", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_serve_executes_the_coordinator_with_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: run.append(arguments))
    (tmp_path / "config.json").touch()
    with pytest.raises(SystemExit):
        app.main(
            [
                "serve",
                "--model",
                str(tmp_path),
                *"--world-size 3 --threads 2 --merge paper --prefill keys --allow-long".split(),
                *"--window-keys replicated --window-bytes 4096".split(),
                *("--model-name", "acme/small 1"),
                *"--sampling-defaults model".split(),
                *"--device cpu --kernels torch --start-timeout 20".split(),
                *"--max-sequences 3 --max-waiting 5 --unread-timeout 7 --max-draft-tokens 5".split(),
            ]
        )
    [command] = run
    assert command[:4] == [sys.executable, "-P", "-m", "coordinator"]
    found = config_from_argument(ServiceConfig, command[4])
    engine = EngineConfig(
        model=str(tmp_path),
        weights="whole",  # the choice for weights of unknown size
        weights_dtype="dequantized",
        world_size=3,
        threads_per_rank=2,
        merge="paper",
        prefill="keys",
        allow_long=True,
        window_keys="replicated",
        window_bytes=4096,
        device="cpu",
        kernels="torch",
        start_timeout=20.0,
        max_sequences=3,
        max_waiting=5,
        unread_timeout=7.0,
        max_draft_tokens=5,
    )
    expected = ServiceConfig(engine=engine, model_name="acme/small 1", sampling_defaults="model", launcher="local")
    assert found == expected


def test_service_receives_every_setting(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"odd\xff")
    folder.mkdir()
    (folder / "config.json").touch()
    config = ServiceConfig(
        engine=EngineConfig(model=str(folder), world_size=2, kv_bytes=1 << 20, weights="sharded", chunk_size=64),
        host="::1",
        port=5,
        launcher="ray",
        ray_address="auto",
        model_name="null",
        sampling_defaults="model",
        gateway=HttpConfig(http=0, allow_host="a,b", allow_origin="https://a,https://b"),
        as_json=True,
    )
    *python, argument = coordinator_command(config)
    assert python == [sys.executable, "-P", "-m", "coordinator"]
    assert argument.isascii() and config_from_argument(ServiceConfig, argument) == config


def test_service_receives_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    given = ["--model", "model", "--data-dir", "data", "--tls-cert", "c", "--tls-key", "k", "--credentials", "t"]
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: run.append(arguments))
    for url, wanted in (("keys", str(tmp_path / "keys")), ("s3://bucket/keys", "s3://bucket/keys")):
        with pytest.raises(SystemExit):
            app.main(["serve", *given, "--snapshot-url", url])
        config = config_from_argument(ServiceConfig, run.pop()[4])
        paths = [config.engine.model, config.data.data_dir, config.security.tls_cert, config.security.tls_key]
        assert paths == [str(tmp_path / name) for name in ("model", "data", "c", "k")]
        assert (config.security.credentials, config.engine.snapshot_url) == (str(tmp_path / "t"), wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingset", "book.txt"], "No such command 'ingset'. Did you mean 'ingest'?"),
        (["contexts", "delte", "x"], "No such command 'delte'. Did you mean 'delete'?"),
        (["serve", "--word-size", "4"], "No such option: --word-size (Possible options: "),
        (["serve", "--word-size", "4"], "--world-size"),
        (["ask", "x", "Who?", "--sorces"], "No such option: --sorces (Possible options: --source-count, --sources)"),
    ],
)
def test_misspelled_commands_and_options_are_corrected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        app.main(arguments)
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge", "x"], "'x' is not one of 'auto', 'paper', "),
        (["--world-size", "x"], "Invalid value for '--world-size': Input should be a valid integer"),
        (["--colour", "red"], "No such option: --colour"),
        (["--wait-for-ranks", "nan"], "error: wait_for_ranks: nan is not between 0 and 1,000,000"),
        (["--drain-seconds", "-1"], "error: drain_seconds: -1 is not between 0 and 1,000,000"),
        (["--port", "70000"], "error: port: 70000 is not between 0 and 65535"),
        (["--tls-key", "k"], "error: --tls-key: requires --tls-cert"),
        (["--metrics-host", "::1"], "error: --metrics-host: requires --metrics-port"),
        (["--share-prefixes"], "error: --share-prefixes: requires credentials: without them there are no tenants"),
        (["--world-size", "0"], "error: --world-size: 0 is not between 1 and 4,096"),
        (["--threads", "0"], "error: --threads: 0 is not between 1 and 1,024"),
        (["--kv-bytes", "0"], "error: --kv-bytes: 0 is not a positive number of bytes"),
        (["--http", "-1"], "error: --http: -1 is not between 0 and 65535"),
        (["--preload"], "error: --preload: requires data_dir"),
        (["--model", "/nowhere"], "error: --model: /nowhere is not a folder"),
        (["--launcher", "local", "--ray-address", "a"], "error: ray_address: requires the launcher ray, not local"),
    ],
)
def test_serve_names_the_invalid_option(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app.main(["serve", *arguments])
    output = capsys.readouterr().err
    assert (end.value.code, message in output) == (2, True), output


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["serve"],
        ["ingest"],
        ["ask"],
        ["generate"],
        ["contexts", "list"],
        ["contexts", "fork"],
        ["contexts", "update"],
        ["tokenize"],
        ["detokenize"],
        ["cluster"],
        ["verify"],
        ["models", "check"],
        ["demo"],
    ],
)
def test_help_contains_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app.main([*command, "--help"])
    assert end.value.code == 0
    assert f"longleaf {command[0] if command else 'demo'}" in capsys.readouterr().out


def test_help_quotes_extras_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.main(["serve", "--help"])
    assert "'longleaf[otel]'" in capsys.readouterr().out


def test_the_command_starts_without_torch() -> None:
    heavy = ("torch", "transformers", "ray", "numpy")
    code = f"import sys, longleaf.cli.app; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_interrupt_during_imports_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typer.py").write_text("import time; print('importing', flush=True); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = Path(sys.executable).with_name("longleaf")
    with subprocess.Popen([command, "--version"], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


def test_interrupt_while_serve_executes_the_coordinator_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = "import os, signal, sys\nif 'coordinator' in sys.orig_argv: os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "sitecustomize.py").write_text(interrupt)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [str(Path(sys.executable).with_name("longleaf")), "serve", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "starting 1 rank (local) …\n")


def command_paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from command_paths(each, (*path, name))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", list(command_paths(get_command(app.app))), ids=" ".join)
def test_help_fills_its_lines_and_shows_no_python_types(
    path: tuple[str, ...], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        app.main([*path, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert not any(mark in line for line in lines for mark in ("<", "list[", "default: ()", "...]..."))
    paragraphs = lines[: next(i for i, line in enumerate(lines) if line and not line.startswith(("Usage", " ")))]
    for line, following in pairwise(paragraphs):
        if line[:2] == following[:2] == "  " and line[2] != " ":
            assert len(f"{line} {following.split()[0]}") > columns - 2, f"torn after: {line}"
