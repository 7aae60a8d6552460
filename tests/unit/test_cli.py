"""The command line: what it prints, its exit codes, and that it starts without torch."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from longleaf import cli
from longleaf.commands.cluster import merge_lines
from longleaf.commands.options import IMPATIENT
from longleaf.config import EngineConfig, default_server
from longleaf.demo.haystack import make_haystack
from longleaf.demo.run import DemoSettings, build
from longleaf.errors import (
    AlreadyExists,
    InvalidArgument,
    LongleafError,
    NotFound,
    ResourceExhausted,
    StartError,
    Unavailable,
    WorkerLost,
)
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.messages import Cluster, ContextSettings, ModelInfo
from longleaf.step import MergeTiming
from tests.service import FakeEngine, byte_tokenizer, serving

ANSWER = tuple((i,) for i in byte_tokenizer().encode("Grüße").ids)


class Terminal:
    """Runs commands against a service."""

    def __init__(self, address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
        self.address, self.engine, self._capsys = address, engine, capsys

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(self._run, [*arguments, "--server", self.address])

    def _run(self, arguments: list[str]) -> tuple[int, str, str]:
        try:
            cli.main(arguments)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *self._capsys.readouterr()

    async def json(self, *arguments: str) -> list[Any]:
        code, out, err = await self.run(*arguments, "--json")
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
async def terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Terminal]:
    engine = FakeEngine()
    engine.answer = ANSWER
    async with serving(engine, tmp_path / "model") as (_, address):
        yield Terminal(address, engine, capsys)


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael. " * 10)
    return str(path)


async def test_a_book_is_ingested_asked_listed_and_deleted(terminal: Terminal, book: str) -> None:
    code, out, err = await terminal.run("ingest", book, "--name", "moby")
    assert (code, out.strip()) == (0, "moby: 172 tokens, 10.8 KiB of keys and values on 1 rank")
    assert "100%" in err
    code, out, err = await terminal.run("ask", "moby", "who?")
    assert (code, out) == (0, "Grüße\n")
    assert "7 tokens (length)" in err
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


async def test_json_of_a_stream_is_one_object_per_event(terminal: Terminal) -> None:
    *deltas, last = await terminal.json("generate", "--prompt", "x", "--seed", "5", "--stop", "q", "--stop", "z")
    assert all(delta.keys() == {"text", "token_ids"} for delta in deltas)
    assert "".join(delta["text"] for delta in deltas) == "Grüße"
    assert last.keys() == {"finish_reason", "usage"}
    assert last["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == len(ANSWER)
    sampling = terminal.engine.prompts[0].sampling
    assert (sampling.seed, sampling.stop) == (5, ("q", "z"))


async def test_every_option_of_a_generation_arrives(terminal: Terminal) -> None:
    typed = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.3 "
    typed += "--frequency-penalty 0.4 --logit-bias 5=-1.5 --logit-bias 6=2 --stop-token 9 --stop-token 8 "
    typed += "--ignore-end-token --logprobs 3 --max-tokens 12 --priority -4 --client me --timeout 60 --resumable"
    terminal.engine.contexts["moby"] = [1]
    await terminal.json("ask", "moby", "who?", *typed.split())
    [prompt] = terminal.engine.prompts
    assert (prompt.context, prompt.priority, prompt.client) == ("moby", -4, "me")
    assert prompt.deadline is not None
    sampling = prompt.sampling
    assert (sampling.logit_bias, sampling.stop_tokens) == ({5: -1.5, 6: 2.0}, (9, 8))
    assert (sampling.top_k, sampling.num_logprobs, sampling.max_tokens) == (7, 3, 12)
    given = (sampling.temperature, sampling.top_p, sampling.min_p)
    assert given == pytest.approx((0.5, 0.9, 0.1))
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == pytest.approx((1.2, 0.3, 0.4))


async def test_questions_may_come_from_standard_input(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.engine.contexts["moby"] = [1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("wer, Grüße?".encode())))
    await terminal.run("ask", "moby", "-")
    assert byte_tokenizer().decode(terminal.engine.prompts[0].token_ids).count("Grüße?") == 1


async def test_a_context_is_forked(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "fork", "moby", "ishmael", "--tokens", "2")
    assert (code, out.splitlines()[0]) == (0, "ishmael: 2 tokens, 128 B of keys and values on 1 rank")
    [context] = await terminal.json("contexts", "fork", "moby", "ahab")
    assert (context["id"], context["tokens"]) == ("ahab", 3)


async def test_a_context_is_updated(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "update", "moby", "--display-name", "Moby-Dick", "--pin")
    assert (code, out.splitlines()[0]) == (0, "moby (Moby-Dick): 3 tokens, 192 B of keys and values on 1 rank")
    assert out.endswith("never expires, pinned\n")
    assert terminal.engine.settings["moby"] == ContextSettings(display_name="Moby-Dick", is_pinned=True)
    await terminal.json("contexts", "update", "moby", "--ttl", "60", "--unpin")
    assert terminal.engine.settings["moby"] == ContextSettings(ttl=60.0, is_pinned=False)
    [context] = await terminal.json("contexts", "update", "moby", "--forever")
    assert (terminal.engine.settings["moby"], context["expires"]) == (ContextSettings(expires=None), None)


async def test_an_ingest_carries_its_settings(terminal: Terminal, book: str) -> None:
    options = ("--ttl", "60", "--display-name", "Moby-Dick", "--pin", "--upload-id", "one")
    [context] = await terminal.json("ingest", book, "--name", "moby", *options)
    wanted = ContextSettings(ttl=60.0, display_name="Moby-Dick", is_pinned=True)
    assert (context["tokens"], terminal.engine.settings["moby"]) == (172, wanted)


async def test_texts_become_tokens_and_back(terminal: Terminal) -> None:
    ids = byte_tokenizer().encode("é!").ids
    assert (await terminal.run("tokenize", "é!"))[1] == " ".join(map(str, ids)) + "\n"
    [found] = await terminal.json("tokenize", "é!", "--spans")
    assert found == {"token_ids": ids, "spans": [[0, 1], [0, 1], [1, 2]]}
    assert "'é'" in (await terminal.run("tokenize", "é!", "--spans"))[1]
    assert (await terminal.run("detokenize", *map(str, ids)))[1] == "é!\n"
    special = str(byte_tokenizer().token_to_id("<|end|>"))
    assert await terminal.json("detokenize", special) == [{"text": ""}]
    assert await terminal.json("detokenize", special, "--special") == [{"text": "<|end|>"}]


async def test_raw_leaves_the_template_out(terminal: Terminal) -> None:
    await terminal.run("generate", "--prompt", "x")
    await terminal.run("generate", "--prompt", "x", "--raw")
    templated, raw = (prompt.token_ids for prompt in terminal.engine.prompts)
    assert raw == tuple(byte_tokenizer().encode("x").ids)
    assert len(templated) == 4


async def test_standard_input_is_a_document_too(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
    [context] = await terminal.json("ingest", "-", "--name", "moby")
    assert context["tokens"] == 2 + len(ANSWER)


async def test_the_cluster_is_a_table(terminal: Terminal) -> None:
    _, out, _ = await terminal.run("cluster")
    assert all(word in out for word in ("rank", "pid", "4711", "cpu", "1,048,576"))
    assert "merge" not in out, "one rank has nothing to merge"


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
        terminal.engine.changes.note()
    terminal.engine.error = Unavailable("the service is stopping")
    terminal.engine.changes.end()
    assert (await process.stderr.read()).decode() == "error: the service is stopping\n"
    assert await process.wait() == 1


async def test_the_cluster_is_watched_as_a_live_table(terminal: Terminal) -> None:
    watching = asyncio.create_task(terminal.run("cluster", "--watch", "--interval", "0.01"))
    await terminal.engine.looked.wait()
    terminal.engine.error = Unavailable("the service is stopping")
    terminal.engine.changes.end()
    code, out, err = await watching
    assert (code, err) == (1, "error: the service is stopping\n")
    assert all(word in out for word in ("3 running, 2 waiting", "rank", "4711"))


def test_the_choice_of_the_merge_is_told_with_its_reason() -> None:
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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ask", "none", "who?"], "contexts/none does not exist"),
        (["ask", "No Name", "who?"], "context: "),
        (["ask", "moby", ""], "text: the question is empty"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "--temperature: must be"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: must be"),
        (["generate", "--prompt", "x", "--min-p", "2"], "--min-p: must be"),
        (["generate", "--prompt", "x", "--samples", "99"], "--samples: must be"),
        (["generate", "--prompt", "x", "--logprobs", "-1"], "--logprobs: must be"),
        (["generate", "--prompt", "x", "--logit-bias", "7"], "--logit-bias: 7 is not ID=BIAS"),
        (["contexts", "fork", "moby", "Ishmael!"], "new_name: "),
        (["contexts", "fork", "none", "new"], "contexts/none"),
        (["contexts", "update", "moby"], "give --display-name, --ttl"),
        (["contexts", "update", "moby", "--ttl", "-1"], "--ttl: "),
        (["contexts", "update", "moby", "--display-name", "x" * 300], "--display-name: has 300"),
        (["detokenize", "99999"], "token_ids.ids[0]"),
        (["contexts", "fork", "moby", "new", "--tokens", str(2**70)], "--tokens: "),
        (["cluster", "--watch", "--interval", "0"], "--interval: "),
        (["ingest", "/nowhere/to/be/found", "--name", "x"], "/nowhere/to/be/found"),
        (["ingest", "/", "--name", "x"], "file: / cannot be read: Is a directory"),
        (["ingest", "/dev/null", "--name", "x"], "/dev/null: the document is empty"),
        (["contexts", "show", "none"], "contexts/none"),
    ],
)
async def test_bad_input_is_one_line_and_exit_code_2(terminal: Terminal, arguments: list[str], told: str) -> None:
    terminal.engine.contexts["moby"] = [1]
    code, out, err = await terminal.run(*arguments, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err
    assert err.count("\n") == 1


async def test_text_that_is_not_utf8_is_refused_with_its_place(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"ab\xff")
    code, _, err = await terminal.run("ingest", str(tmp_path / "bad"), "--name", "x")
    assert code == 2
    assert err.strip() == f"error: {tmp_path / 'bad'}: is not UTF-8 at byte 2: invalid start byte"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--max-tokens", "0"), "--max-tokens: must be between 1 and 1048576"),
        (("--max-tokens", str(10**14)), "--max-tokens: must be between 1 and 1048576"),
        (("--seed", "-1"), "--seed: must be between 0 and 2^64 - 1"),
        (("--temperature", "-1"), "--temperature: must be between 0 and 100"),
    ],
)
async def test_wrong_options_are_told_by_their_names_and_limits(
    terminal: Terminal, options: tuple[str, str], told: str
) -> None:
    code, _, err = await terminal.run("generate", "--prompt", "x", *options)
    assert (code, err) == (2, f"error: {told}\n")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"longleaf \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_empty_server_variable_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLEAF_SERVER", "")
    assert default_server() == "localhost:50051"


def test_no_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["cluster", "--server", "127.0.0.1:1"])
    assert end.value.code == 1
    *retries, error = capsys.readouterr().err.splitlines()
    assert len(retries) == IMPATIENT
    assert all(line.startswith("trying again in ") for line in retries)
    assert error.startswith("error: the server at 127.0.0.1:1 does not answer")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("a", "b"), 2),
        (NotFound("a"), 2),
        (AlreadyExists("a"), 2),
        (StartError("a"), 2),
        (Unavailable("a"), 1),
        (WorkerLost(1, "a"), 1),
        (ResourceExhausted("a", "b"), 1),
        (LongleafError("a"), 1),
    ],
)
def test_exit_codes(error: LongleafError, code: int) -> None:
    assert cli.exit_code(error) == code


@pytest.mark.parametrize("arguments", [["--world-size", "0"], ["--model", "/nowhere"], ["--port", "70000"]])
def test_serve_refuses_what_cannot_work_at_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_serve_becomes_the_coordinator_with_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: run.append(arguments))
    (tmp_path / "config.json").touch()
    with pytest.raises(SystemExit):
        cli.main(
            ["serve", "--model", str(tmp_path), *"--world-size 3 --threads 2 --merge paper --prefill keys".split()]
        )
    [command] = run
    assert command[:4] == [sys.executable, "-P", "-m", "coordinator"]
    wanted = {f"--model={tmp_path}", "--world-size=3", "--threads-per-rank=2", "--merge=paper", "--port=50051"}
    wanted |= {"--prefill=keys"}
    assert wanted <= set(command)
    assert not any(option.startswith(("--kv-bytes", "--ray-address")) for option in command)


def test_the_coordinator_knows_every_option(tmp_path: Path) -> None:
    from coordinator.__main__ import parse

    (tmp_path / "config.json").touch()
    config = EngineConfig(model=str(tmp_path), world_size=2, kv_bytes=1 << 20, dtype="float32", chunk_size=64)
    command = coordinator_command(config, host="::1", port=5, launcher="ray", ray_address="auto", as_json=True)
    parsed = parse(command[4:])
    assert parsed.engine == config
    assert (parsed.host, parsed.port, parsed.launcher, parsed.ray_address) == ("::1", 5, "ray", "auto")
    assert parsed.as_json


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
        ["demo"],
    ],
)
def test_help_teaches_with_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0
    assert f"longleaf {command[0] if command else 'demo'}" in capsys.readouterr().out


def test_the_command_starts_without_torch() -> None:
    code = "import sys, longleaf.cli; print([m for m in ('torch', 'transformers', 'ray', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


# The service as a process


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_service_that_is_ready_is_found_and_ended() -> None:
    code = "import signal; print('noise'); print('listening on 127.0.0.1:5', flush=True); signal.pause()"
    with ServiceProcess(python(code)) as service:
        assert service.wait_ready(20) == "127.0.0.1:5"
        process = service._process
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        ("sys.exit('error: too few slots')", Unavailable, r"^too few slots$"),
        ("print('error: too few slots', file=sys.stderr); sys.exit(2)", StartError, r"^too few slots$"),
        ("raise KeyError('x')", Unavailable, r"exit code 1(.|\n)*KeyError"),
    ],
)
def test_a_service_that_fails_says_why(code: str, kind: type[LongleafError], told: str) -> None:
    with ServiceProcess(python(f"import sys; {code}")) as service, pytest.raises(kind, match=told):
        service.wait_ready(20)


def test_a_service_that_is_never_ready_is_given_up() -> None:
    with (
        ServiceProcess(python("import signal; signal.pause()")) as service,
        pytest.raises(StartError, match="not ready"),
    ):
        service.wait_ready(0.05)


# The demo's document


def test_the_demos_document_is_the_seeds(tmp_path: Path) -> None:
    assert build(DemoSettings(tokens=4000, seed=3)) == make_haystack(3, 4000, facts=5, absent=1)


def test_facts_are_planted_in_the_users_own_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("línea una\n" * 100)
    haystack = build(DemoSettings(file=path, seed=1))
    assert haystack.text.replace("línea una\n", "").count("\n") == len(haystack.facts) == 5
    assert all(fact.sentence in haystack.text for fact in haystack.facts)
    assert all(fact.key not in haystack.text for fact in haystack.absent)
    assert len(haystack.absent) == 1


@pytest.mark.parametrize(("content", "told"), [(None, "cannot be read"), (b"\xff", "byte 0")])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=told):
        build(DemoSettings(file=path))


def test_a_demo_too_small_for_its_facts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        DemoSettings(tokens=10).check()
