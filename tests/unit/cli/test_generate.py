"""`longleaf ask` and `longleaf generate`."""

import io
import sys

import pytest
from msgspec.structs import replace

from coordinator import engine_messages
from longleaf.sampling import Logprobs, Token, TokenLogprob
from tests.support.service import byte_tokenizer
from tests.support.terminal import ANSWER, Terminal


async def test_json_of_a_stream_is_one_object_per_event(terminal: Terminal) -> None:
    *deltas, last = await terminal.json("generate", "--prompt", "x", "--seed", "5", "--stop", "q", "--stop", "z")
    assert all(delta.keys() == {"text", "token_ids"} for delta in deltas)
    assert "".join(delta["text"] for delta in deltas) == "Grüße"
    assert last.keys() == {"finish_reason", "usage", "is_exact"}
    assert last["finish_reason"] == "length"
    usage = {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": len(ANSWER)}
    assert last["usage"] == usage | {"drafted_tokens": 0, "accepted_tokens": 0, "reasoning_tokens": 0}
    sampling = terminal.engine.prompts[0].sampling
    assert (sampling.seed, sampling.stop) == (5, ("q", "z"))


async def test_inexact_answer_gives_the_reason(terminal: Terminal) -> None:
    terminal.engine.exactness_note = "not verified"
    *_, last = await terminal.json("generate", "--prompt", "x")
    assert (last["is_exact"], last["exactness_note"]) == (False, "not verified")
    assert (await terminal.run("generate", "--prompt", "x"))[2].rstrip().endswith("; not exact (not verified)]")
    assert "answers are not exact (not verified)" in (await terminal.run("cluster"))[1]
    [cluster] = await terminal.json("cluster")
    assert (cluster["is_exact"], cluster["exactness_note"]) == (False, "not verified")


async def test_dequantization_of_the_weights_is_shown_with_the_exactness(terminal: Terminal) -> None:
    note = terminal.engine.dequantization = "fp8 128x128 checkpoint, computed in bfloat16"
    *_, last = await terminal.json("generate", "--prompt", "x")
    assert (last["is_exact"], last["dequantization"]) == (True, note)
    assert (await terminal.run("generate", "--prompt", "x"))[2].rstrip().endswith(f"; exact ({note})]")
    assert f"answers are exact ({note})" in (await terminal.run("cluster"))[1]
    terminal.engine.exactness_note = "not verified"
    assert f"answers are not exact (not verified; {note})" in (await terminal.run("cluster"))[1]


@pytest.mark.parametrize("options", [(), ("--json",), ("--samples", "2")])
async def test_answer_beyond_the_trained_length_causes_one_notice(terminal: Terminal, options: tuple[str, ...]) -> None:
    ends = (engine_messages.Ended("length", 1, 0, 0, 0.0, 0.0, 0.0, sample) for sample in range(2))
    terminal.engine.answer = ()
    terminal.engine.script = (engine_messages.Admitted(1, 0, is_beyond_trained=True),) * 2 + tuple(ends)
    code, _, err = await terminal.run("generate", "--prompt", "x", *options)
    message = "note: the answer may be longer than the model was trained for"
    assert (code, err.splitlines().count(message)) == (0, 1)
    terminal.engine.script = terminal.engine.script[2:]
    assert message not in (await terminal.run("generate", "--prompt", "x"))[2]


async def test_every_generation_option_reaches_the_engine(terminal: Terminal) -> None:
    typed = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.3 "
    typed += "--frequency-penalty 0.4 --logit-bias 5=-1.5 --logit-bias 6=2 --stop-token 9 --stop-token 8 "
    typed += "--ignore-end-token --logprobs 3 --max-tokens 12 --priority -4 --client me --timeout 60 --resumable"
    terminal.engine.contexts["moby"] = [1]
    await terminal.json("ask", "moby", "who?", *typed.split())
    [prompt] = terminal.engine.prompts
    assert (prompt.context, prompt.scheduling.priority, prompt.scheduling.client) == ("moby", -4, "me")
    assert prompt.scheduling.deadline is not None
    sampling = prompt.sampling
    assert (sampling.logit_bias, sampling.stop_tokens) == ({5: -1.5, 6: 2.0}, (9, 8))
    assert (sampling.top_k, sampling.num_logprobs, sampling.max_tokens) == (7, 3, 12)
    given = (sampling.temperature, sampling.top_p, sampling.min_p)
    assert given == pytest.approx((0.5, 0.9, 0.1))
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == pytest.approx((1.2, 0.3, 0.4))


@pytest.mark.parametrize(("typed", "most"), [((), 7), ((0,), 0), ((3,), 3), ((31,), 7)])
async def test_drafts_are_limited_by_service_and_request(terminal: Terminal, typed: tuple[int, ...], most: int) -> None:
    await terminal.run("generate", "--prompt", "x", *(f"--max-draft-tokens={number}" for number in typed))
    assert [prompt.max_draft_tokens for prompt in terminal.engine.prompts] == [most]


@pytest.mark.parametrize("count", [-1, 32])
async def test_invalid_number_of_drafts_is_refused(terminal: Terminal, count: int) -> None:
    code, out, err = await terminal.run("generate", "--prompt", "x", f"--max-draft-tokens={count}")
    assert (code, out, err) == (2, "", "error: --max-draft-tokens: must be between 0 and 31\n")


async def test_drafts_are_reported_if_there_were_any(terminal: Terminal) -> None:
    token_ids = byte_tokenizer().encode("abc").ids
    output = engine_messages.Tokens(0, tuple(map(Token, token_ids)), 0, (), 1234, 2)
    terminal.engine.answer, end = (), engine_messages.Ended("length", 1, 0, 3, 0.0, 0.0, 0.0)
    terminal.engine.script = (output, end)
    *_, last = await terminal.json("generate", "--prompt", "x")
    assert (last["usage"]["drafted_tokens"], last["usage"]["accepted_tokens"]) == (1234, 2)
    message = "; 2 of 1,234 drafted tokens accepted; "
    assert message in (await terminal.run("generate", "--prompt", "x"))[2]
    terminal.engine.script = (replace(output, num_drafted=0, num_accepted=0), end)
    assert "drafted" not in (await terminal.run("generate", "--prompt", "x"))[2]


async def test_question_may_come_from_standard_input(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.engine.contexts["moby"] = [1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("wer, Grüße?".encode())))
    await terminal.run("ask", "moby", "-")
    assert byte_tokenizer().decode(list(terminal.engine.prompts[0].token_ids)).count("Grüße?") == 1


async def test_raw_skips_the_chat_template(terminal: Terminal) -> None:
    await terminal.run("generate", "--prompt", "x")
    await terminal.run("generate", "--prompt", "x", "--raw")
    templated, raw = (tuple(prompt.token_ids) for prompt in terminal.engine.prompts)
    assert raw == tuple(byte_tokenizer().encode("x").ids)
    assert len(templated) == 4


async def test_repeated_command_replays_a_named_answer(terminal: Terminal) -> None:
    named = ("--resumable", "--request-id", "r1")
    first = await terminal.json("generate", "--prompt", "x", *named)
    assert await terminal.json("generate", "--prompt", "x", *named) == first
    assert len(terminal.engine.prompts) == 1
    code, _, err = await terminal.run("generate", "--prompt", "y", *named)
    assert (code, err) == (2, "error: --request-id: r1 is in use by another request\n")


async def test_token_bytes_are_printed_as_base64(terminal: Terminal) -> None:
    end, first = engine_messages.Ended("length", 1, 0, 1, 0.0, 0.0, 0.0), byte_tokenizer().encode("G").ids[0]
    token = Token(first, Logprobs(-1.0, (TokenLogprob(first, -1.0),)))
    terminal.engine.script = (engine_messages.Tokens(0, (token,)), end)
    terminal.engine.answer = ()
    requested = ("generate", "--prompt", "x", "--logprobs", "1")
    [entry] = (await terminal.json(*requested, "--token-bytes"))[0]["logprobs"]
    assert (entry["token_bytes"], entry["top"][0]["token_bytes"]) == ("Rw==", "Rw==")
    [entry] = (await terminal.json(*requested))[0]["logprobs"]
    assert entry == {"logprob": -1.0, "top": [{"token_id": first, "logprob": -1.0}]}
    code, _, err = await terminal.run("generate", "--prompt", "x", "--token-bytes", "--json")
    assert (code, err) == (2, "error: --token-bytes: needs --logprobs\n")


async def test_logprobs_without_json_are_refused(terminal: Terminal) -> None:
    code, out, err = await terminal.run("generate", "--prompt", "x", "--logprobs", "2")
    assert (code, out, err) == (2, "", "error: --logprobs: needs --json\n")
