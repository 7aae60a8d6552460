"""The commands of the README against a real service of two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from longleaf.client import Client
from longleaf.types import Delta, Message
from tests.support import forked
from tests.support.command_line import CLI, NAME, Served
from tests.support.thinned import thinned

TEXT = "The lighthouse keeper wrote: ümläute, 日本語, and 🌲 trees.\n" * 20


@pytest.fixture
def book(served: Served, tmp_path: Path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT, encoding="utf-8")
    made = served.json("ingest", str(file), "--name", "book")
    yield made
    served.run("contexts", "delete", "book")


def expected(checkpoint: Path, text: str, num_tokens: int) -> list[int]:
    """Greedy ids of transformers for begin token, template and text."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = [0, *tokenizer.encode(f"<u>{text}</u>", add_special_tokens=False).ids]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = torch.tensor([ids])
    # without an explicit mask `generate` treats the begin token as padding
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    found = model.generate(prompt, max_new_tokens=num_tokens, **options)
    return found[0, len(ids) :].tolist()


def test_ingested_document_is_answered_like_a_single_device(served: Served, checkpoint: Path, book):
    found = served.run("ask", "book", "Who wrote?", "--max-tokens", "24", "--ignore-end-token", "--json")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    ids = [token for line in lines[:-1] for token in line["token_ids"]]
    assert ids == expected(checkpoint, f"{TEXT}\n\nWho wrote?", 24)
    assert lines[-1]["finish_reason"] == "length"
    assert lines[-1]["usage"]["completion_tokens"] == 24
    assert lines[-1]["usage"]["cached_tokens"] >= 1000


def test_system_message_and_conversation_are_answered_like_a_single_device(
    served: Served, checkpoint: Path, tmp_path: Path
):
    (tmp_path / "text").write_text(TEXT)
    served.json("ingest", str(tmp_path / "text"), "--name", "told", "--system", "Be brief.")
    messages = [Message(*turn) for turn in (("user", "Who wrote?"), ("assistant", "He did."), ("user", "Who?"))]
    with Client(served.address) as client:
        events = list(client.chat(messages, context="told", max_tokens=24, ignore_end_token=True))
        client.delete_context("told")
    ids = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    text = f"Be brief.</u><u>{TEXT}\n\nWho wrote?</u><u>He did.</u><u>Who?"
    assert ids == expected(checkpoint, text, 24)


def test_append_equals_one_ingest(served: Served, book, tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    cut = 5 * (TEXT.index("\n") + 1)
    first.write_text(TEXT[:cut])
    second.write_text(TEXT[cut:])
    served.json("ingest", str(first), "--name", "parts")
    served.json("ingest", str(second), "--name", "parts", "--append")
    answers = [served.run("ask", name, "Who?", "--max-tokens", "16", "--json").stdout for name in ("book", "parts")]
    served.run("contexts", "delete", "parts")
    texts = ["".join(json.loads(line).get("text", "") for line in answer.splitlines()) for answer in answers]
    assert texts[0] == texts[1] != ""


def test_clients_see_the_configured_model_name(served: Served):
    assert served.json("cluster")["model"]["name"] == NAME
    assert served.run("cluster").stdout.startswith(f"{NAME} (")


@pytest.mark.slow
@pytest.mark.ray
def test_clients_see_the_configured_model_name_on_ray(checkpoint: Path, tmp_path: Path):
    """The name does not depend on the folder."""
    for folder in ("first", "second"):
        (tmp_path / folder).symlink_to(checkpoint)
        options = (
            "--model",
            str(tmp_path / folder),
            "--model-name",
            NAME,
            "--launcher",
            "ray",
            "--kv-bytes",
            "8000000",
        )
        with Served(*options) as service:
            assert service.json("cluster")["model"]["name"] == NAME
            assert service.stop() == 0


def test_contexts_are_listed_shown_and_deleted(served: Served, book):
    assert [context["id"] for context in served.json("contexts", "list")["contexts"]] == ["book"]
    shown = served.json("contexts", "show", "book")
    assert shown["tokens"] == sum(share["tokens"] for share in shown["shares"])
    assert all(share["tokens"] > 0 for share in shown["shares"])
    assert served.run("contexts", "delete", "book").returncode == 0
    assert served.json("contexts", "list")["contexts"] == []


def test_example_runs(served: Served, tmp_path: Path):
    book, example = tmp_path / "book.txt", Path(__file__).parents[2] / "examples" / "ask.py"
    book.write_text(TEXT, encoding="utf-8")
    command = [sys.executable, str(example), str(book), "Who wrote?", "And what?"]
    environment = os.environ | {"LONGLEAF_SERVER": served.address}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("of the prompt were held]") == 2
    assert served.json("contexts", "list")["contexts"] == []


def test_generate_streams_text_and_repeats_with_a_seed(served: Served):
    options = ("generate", "--prompt", "Once", "--max-tokens", "20", "--temperature", "0.9", "--seed", "5", "--raw")
    first, second = served.run(*options), served.run(*options)
    assert first.returncode == 0
    assert first.stdout == second.stdout != ""


def test_resumed_client_prints_the_same_answer(served: Served):
    command = ["generate", "--prompt", "Once", "--max-tokens", "300", "--temperature", "0.9", "--ignore-end-token"]
    command += ["--resumable", "--request-id", "killed", "--json"]
    process = forked.popen([*CLI, *command, "--server", served.address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(5)]
    process.kill()
    seen += process.stdout.read().splitlines(keepends=True)[:-1]  # the last line may be incomplete
    process.wait()
    again = served.run(*command).stdout.splitlines()
    assert text_of(again).startswith(text_of(seen))
    assert json.loads(again[-1])["usage"]["completion_tokens"] == 300
    assert served.run(*command).stdout.splitlines()[-1] == again[-1]


def text_of(lines: list[str]) -> str:
    return "".join(json.loads(line).get("text", "") for line in lines)


def test_terminal_output_is_a_table(served: Served, book):
    for command, words in (
        (("cluster",), ("rank", "pid", "cpu", "compiled")),
        (("verify",), ("passed", "float32", "keys on 2 of 2 ranks")),
        (("contexts", "list"), ("book", "1,204")),
        (("contexts", "show", "book"), ("book", "rank")),
    ):
        found = served.run(*command)
        assert found.returncode == 0, found.stderr
        assert all(word in found.stdout.lower() for word in words), found.stdout


def test_choice_of_kernels_and_merge_is_reported_by_the_cluster_command_only(served: Served):
    cluster = served.json("cluster")
    assert {worker["kernels"] for worker in cluster["workers"]} == {"compiled"}
    assert "kernels: " not in served.output
    assert "merge for up to " not in served.output
    assert [timing["rows"] for timing in cluster["merge_timings"]] == [1, 8, 64]
    for timing in cluster["merge_timings"]:
        assert set(timing["microseconds"]) == {"paper", "packed", "gather", "exchange", "butterfly"}
        assert timing["merge"] in timing["microseconds"]


def test_the_start_prints_a_summary(served: Served):
    labels = ("model ", "ranks ", "document ", "capacity ")
    lines = [line for line in served.output.splitlines() if line.startswith(labels)]
    assert [line.split()[0] for line in lines] == ["model", "ranks", "document", "capacity"]
    assert lines[1:3] == [
        "ranks        2 on cpu with 1 thread each, launcher local",
        "document     up to 8,192 tokens, with its questions and answers",
    ]


BAD_INPUT = [
    (("ask", "nobody", "Who?"), "no context named nobody"),
    (("generate", "--prompt", "x" * 40_000), "8,192"),
    (("contexts", "show", "nobody"), "no context named nobody"),
    (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
    (("generate", "--prompt", ""), "prompt is empty"),
    (("ask", "", "Who?"), "'' is not a valid context name"),
    (("generate", "--prompt", "x", "--max-tokens", "9000"), "8,192"),
    (("ingest", "/nowhere/at/all", "--name", "x"), "/nowhere/at/all"),
]


@pytest.mark.parametrize(("command", "words"), thinned(BAD_INPUT, 2))
def test_invalid_input_exits_with_code_2_and_one_line(served: Served, command, words):
    found = served.run(*command)
    assert found.returncode == 2
    assert words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(("content", "words"), [(b"", "the document is empty"), (b"abc \xff\xfe", "UTF-8")])
def test_rejected_documents_leave_no_context(served: Served, book, tmp_path: Path, content, words):
    file = tmp_path / "bad"
    file.write_bytes(content)
    found = served.run("ingest", str(file), "--name", "bad")
    assert (found.returncode, words in found.stderr) == (2, True), found.stderr
    assert found.stderr.startswith(f"error: {file}: "), "no part of a progress bar remains above"
    assert [context["id"] for context in served.json("contexts", "list")["contexts"]] == ["book"]
    appended = served.run("ingest", str(file), "--name", "book", "--append")
    assert appended.returncode == 2
    assert served.json("contexts", "show", "book") == book


def test_document_beyond_the_limit_is_refused_with_the_limit(served: Served, tmp_path: Path):
    file = tmp_path / "long"
    file.write_text("word " * 60_000)
    found = served.run("ingest", str(file), "--name", "long")
    assert found.returncode == 2
    assert "8,192" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "int8"), ("float16", "auto")])
def test_embedded_model_finds_facts_in_every_dtype(dtype: str, kv_dtype: str, tmp_path: Path):
    file = tmp_path / "stock.txt"
    file.write_text("Nothing of note is written here, and nothing will be.\namber-12 = 4711\njade-7 = 0815\n" * 20)
    options = ("--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000")
    with Served("--dtype", dtype, "--kv-dtype", kv_dtype, *options) as service:
        made = service.json("ingest", str(file), "--name", "stock")
        answer = service.run("ask", "stock", "What is the value of jade-7?", "--max-tokens", "40")
        cluster = service.json("cluster")
        assert service.stop() == 0
    assert answer.stdout == "jade-7 is 0815\n"
    retained = dtype if kv_dtype == "auto" else kv_dtype
    assert (cluster["model"]["dtype"], cluster["model"]["kv_dtype"]) == (dtype, retained)
    is_exact = kv_dtype == "auto"
    assert made["is_exact"] is cluster["is_exact"] is is_exact
    message = "exact" if is_exact else "not exact (keys and values are rounded to int8)"
    assert answer.stderr.rstrip().endswith(f"; {message}]")
