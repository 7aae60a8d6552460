"""Generations over real sockets, on an engine with scripted answers."""

import asyncio
import time
from array import array
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tokenizers import decoders

from coordinator import engine_messages
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.text.detokenizer import Alphabet, ids_before
from coordinator.text.encoder import Encoder
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf import codec
from longleaf.client import AsyncClient, Client
from longleaf.errors import (
    InvalidArgument,
)
from longleaf.sampling import Logprobs, Token, TokenLogprob
from longleaf.types import Delta, Finished, Started, Usage
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.sentencepiece import sentencepiece_tokenizer
from tests.support.service import BYTES, TEXT, FakeEngine, Served, byte_tokenizer, collect, ids, tokens, write_model

pytestmark = pytest.mark.timeout(60)


async def test_answer_streams_whole_characters_and_all_its_tokens(service: Served) -> None:
    service.engine.answer = tuple((token_id,) for token_id in ids(TEXT))
    found = [event async for event in service.client.generate("hello", max_tokens=99)]
    assert isinstance(found[0], Started)
    deltas = [event for event in found if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert "\ufffd" not in TEXT
    assert tuple(i for delta in deltas for i in delta.token_ids) == ids(TEXT)
    starts = [sum(len(other.token_ids) for other in deltas[:n]) for n in range(len(deltas))]
    assert [delta.index for delta in deltas] == starts
    finished = found[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.completion_tokens) == ("length", len(ids(TEXT)))
    assert finished.timings.first_token_seconds == 1.5


async def test_prompt_goes_through_the_chat_template(service: Served) -> None:
    await collect(service.client.generate("<|end|>"))
    prompt = service.engine.prompts[0]
    begin, user, model = (BYTES.token_to_id(name) for name in ("<|begin|>", "<|user|>", "<|model|>"))
    plain = tuple(BYTES.token_to_id(c) for c in "<|end|>")
    assert tuple(prompt.token_ids) == (begin, user, *plain, model)
    assert prompt.end_tokens == {BYTES.token_to_id("<|end|>")}


async def test_sampling_settings_arrive_and_defaults_are_filled_in(service: Served) -> None:
    await collect(service.client.generate([1, 2], temperature=0.5, top_k=7, seed=2**64 - 1, stop=["a", "b"]))
    await collect(service.client.generate([1, 2]))
    given, default = (prompt.sampling for prompt in service.engine.prompts)
    assert (given.temperature, given.top_k, given.seed, given.stop) == (0.5, 7, 2**64 - 1, ("a", "b"))
    assert (default.temperature, default.top_p, default.max_tokens, default.stop) == (0.0, 1.0, 128, ())
    assert tuple(service.engine.prompts[0].token_ids) == (1, 2)


async def test_priority_client_samples_and_deadline_reach_the_engine(
    service: Served, channel: grpc.aio.Channel
) -> None:
    stub = GenerationServiceStub(channel)
    service.engine.script = tuple(
        engine_messages.Ended("length", 1, 0, 0, 0.0, 0.0, 0.0, sample) for sample in range(3)
    )
    given = service_pb.GenerateRequest(text="x", sample_count=3, priority=-7, client_id="me")
    before = time.monotonic()
    finished = [response async for response in stub.Generate(given, timeout=500)]
    assert [response.finished.sample_index for response in finished[2:]] == [0, 1, 2]
    service.engine.script = ()
    assert [r async for r in stub.Generate(service_pb.GenerateRequest(text="x"))]
    first, default = service.engine.prompts
    assert (first.num_samples, first.scheduling.priority, first.scheduling.client) == (3, -7, "me")
    assert first.scheduling.deadline is not None
    assert before + 400 < first.scheduling.deadline < time.monotonic() + 505  # gRPC rounds it up to be sent
    assert (default.num_samples, default.scheduling.priority, default.scheduling.deadline) == (1, 0, None)
    assert default.scheduling.client == "ipv4:127.0.0.1"


async def test_samples_are_interleaved_and_a_stop_string_ends_only_its_sample(
    service: Served, channel: grpc.aio.Channel
) -> None:
    output = [(0, 0, "one "), (1, 0, "two"), (1, 3, "END"), (0, 4, "more"), (1, 6, "lost")]
    parts = (engine_messages.Tokens(index, tokens(ids(text)), sample) for sample, index, text in output)
    service.engine.script = (*parts, engine_messages.Ended("length", 9, 0, 8, 0.5, 1.5, 2.0, 0))
    request = codec.encode_generate("x", None, {"stop": ["END"], "num_samples": 2})
    responses = [codec.decode_event(r) async for r in GenerationServiceStub(channel).Generate(request)]
    texts = {0: "", 1: ""}
    for delta in (event for event in responses if isinstance(event, Delta)):
        texts[delta.sample] += delta.text
    assert texts == {0: "one more", 1: "two"}
    ends = {
        event.sample: (event.reason, event.usage.completion_tokens)
        for event in responses[2:]
        if isinstance(event, Finished)
    }
    assert ends == {1: ("stop", 6), 0: ("length", 8)}
    assert service.engine.streams[0].cancelled == [1]
    await service.engine.streams[0].closed.wait()


async def test_logprobs_arrive_with_their_tokens(service: Served) -> None:
    token_ids = ids("é!")
    entries = [Logprobs(-float(i), (TokenLogprob(i, -0.5),)) for i in range(len(token_ids))]
    parts = [engine_messages.Tokens(i, (Token(token_ids[i], entries[i]),)) for i in range(len(token_ids))]
    service.engine.script = (*parts, engine_messages.Ended("length", 1, 0, len(token_ids), 0.0, 0.0, 0.0))
    answer = service.client.generate("x", num_logprobs=1)
    deltas = [event async for event in answer if isinstance(event, Delta)]
    assert [(delta.text, len(delta.logprobs)) for delta in deltas] == [("é", 2), ("!", 1)]
    assert [entry for delta in deltas for entry in delta.logprobs] == entries
    assert service.engine.prompts[0].sampling.num_logprobs == 1


async def test_token_bytes_are_sent_on_request(service: Served) -> None:
    """A character that is split over two tokens is in neither token's text."""
    token_ids = ids("é!")
    entries = [Logprobs(-1.0, tuple(TokenLogprob(i, -0.5) for i in (token_id, ids("a")[0]))) for token_id in token_ids]
    parts = [engine_messages.Tokens(i, (Token(token_ids[i], entries[i]),)) for i in range(len(token_ids))]
    service.engine.script = (*parts, engine_messages.Ended("length", 1, 0, len(token_ids), 0.0, 0.0, 0.0))
    answer = service.client.generate("x", num_logprobs=2, with_token_bytes=True)
    events = [entry for event in [e async for e in answer] if isinstance(event, Delta) for entry in event.logprobs]
    assert [entry.token_bytes for entry in events] == [b"\xc3", b"\xa9", b"!"]
    assert [[one.token_bytes for one in entry.top] for entry in events] == [
        [b"\xc3", b"a"],
        [b"\xa9", b"a"],
        [b"!", b"a"],
    ]


async def test_rope_scaling_of_an_answer_is_reported(service: Served) -> None:
    service.engine.scaling = "positions are scaled"
    _, finished = await collect(service.client.generate("x", max_tokens=3))
    assert (finished.is_exact, finished.exactness_note) == (False, "positions are scaled")


@pytest.mark.parametrize("kind", ["prepend", "always", "first"])
async def test_continuation_keeps_its_first_space(kind: str, tmp_path: Path) -> None:
    """SentencePiece-like decoders drop the space before a text; an answer in a chat is a separate text."""
    fast, engine = sentencepiece_tokenizer(kind), FakeEngine()
    there, hi = fast.token_to_id("▁there"), fast.token_to_id("Hi")
    engine.answer = ((there,), (hi,))
    template = "{{ '<|user|>' + messages[0].content + '<|assistant|>' }}"
    tokenizer = Tokenizer.load(write_model(tmp_path, fast, template), DirectRenderer())
    application = Application(engine, tokenizer, engine.describe)
    server = GrpcServer(application)
    options: dict[str, Any] = {"max_tokens": 2, "num_logprobs": 0, "with_token_bytes": True}
    async with AsyncClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}") as client:
        for is_chat, wanted in ((True, "thereHi"), (False, " thereHi")):
            text, _ = await collect(client.generate("Hi", use_chat_template=is_chat, **options))
            assert text == wanted
        text, _ = await collect(client.generate([there, hi], use_chat_template=False, **options))
        assert text == " thereHi"
    await server.stop(None)
    await application.close()


def test_prompt_of_a_continuation_must_end_with_a_whole_character() -> None:
    texts = {1: "a", 2: "\ufffd", 3: ""}
    alphabet = Alphabet(decode=lambda found: "".join(texts[each] for each in found), silent=frozenset({9}))
    assert ids_before(alphabet, [1] * 20) == (1,) * 8
    assert ids_before(alphabet, [1, 9, 3]) == (1, 3)
    for prompt in ([1, 2], [9], []):
        assert ids_before(alphabet, prompt) == ()


async def test_partial_character_bytes_are_refused(service: Served, tmp_path: Path) -> None:
    suffixes = byte_tokenizer()
    suffixes.decoder = decoders.BPEDecoder()
    engine = FakeEngine()
    tokenizer = Tokenizer.load(write_model(tmp_path / "other", suffixes), DirectRenderer())
    application = Application(engine, tokenizer, engine.describe)
    server = GrpcServer(application)
    async with AsyncClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}") as client:
        with pytest.raises(InvalidArgument, match="text of its tokens together only") as caught:
            await collect(client.generate("x", num_logprobs=0, with_token_bytes=True))
    await server.stop()
    await application.close()
    assert (caught.value.field, engine.prompts) == ("return_token_bytes", [])


async def test_stop_string_across_tokens_ends_the_engine_stream(service: Served) -> None:
    service.engine.answer = tuple((token_id,) for token_id in ids("one END two"))
    service.engine.is_endless = True
    text, finished = await collect(service.client.generate("x", stop=["END"]))
    assert text == "one "
    assert (finished.reason, finished.matched_stop) == ("stop", "END")
    assert finished.usage == Usage(finished.usage.prompt_tokens, 0, len(ids("one END")))
    await service.engine.streams[0].closed.wait()


async def test_end_token_is_counted_without_text(service: Served) -> None:
    end = BYTES.token_to_id("<|end|>")
    service.engine.answer, service.engine.reason = ((*ids("ok"), end),), "end_token"
    found = [event async for event in service.client.generate("x")]
    deltas = [event for event in found if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "ok"
    assert sum(len(delta.token_ids) for delta in deltas) == 3


async def test_closing_an_answer_closes_the_engine_stream(service: Served) -> None:
    service.engine.answer, service.engine.is_endless = (ids("a"),), True
    async with aclosing(service.client.generate("x")) as answer:
        async for event in answer:
            if isinstance(event, Delta):
                break
    await service.engine.streams[0].closed.wait()


async def test_lost_client_closes_an_idle_stream(service: Served) -> None:
    service.engine.is_endless = True
    reading = asyncio.create_task(collect(service.client.generate("x")))
    await service.engine.opened.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await service.engine.streams[0].closed.wait()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": -0.1}, "sampling.top_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": 0}, "sampling.max_token_count"),
        ({"max_tokens": 2**40}, "sampling.max_token_count"),
        ({"seed": -1}, "sampling.seed"),
        ({"stop": [""]}, "sampling.stop"),
        ({"stop": ["x"] * 17}, "sampling.stop"),
        ({"stop": "END"}, "sampling.stop"),
        ({"stop": b"END"}, "sampling.stop"),
        ({"stop_tokens": b"END"}, "sampling.stop_token_ids"),
        ({"stop_tokens": bytearray(b"END")}, "sampling.stop_token_ids"),
        ({"stop_tokens": [10**6]}, "sampling.stop_token_ids"),
        ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: 101.0}}, "sampling.logit_bias"),
        ({"num_logprobs": 21}, "sampling.logprob_count"),
    ],
)
async def test_invalid_sampling_settings_name_the_field(service: Served, options: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await collect(service.client.generate("x", **options))
    assert caught.value.field == field
    assert not service.engine.prompts


@pytest.mark.parametrize("prompt", [b"one", bytearray(b"one"), memoryview(b"one")], ids=lambda p: type(p).__name__)
async def test_bytes_are_accepted_as_text(service: Served, prompt: Any) -> None:
    await collect(service.client.generate("one"))
    await collect(service.client.generate(prompt))
    text, raw = service.engine.prompts
    assert raw.token_ids == text.token_ids


@pytest.mark.parametrize(
    "prompt", [array("I", [5, 6]), np.array([5, 6]), range(5, 7), iter([5, 6])], ids=lambda p: type(p).__name__
)
async def test_prompt_may_be_any_sequence_of_ids(service: Served, prompt: Any) -> None:
    await collect(service.client.generate(prompt))
    assert list(service.engine.prompts[0].token_ids) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "context", "field"),
    [
        ("", None, "text"),
        ("", "moby", "text"),
        ([], None, "token_ids"),
        ([1, 10**6], None, "token_ids.ids[1]"),
        ([-1], None, "token_ids.ids[0]"),
        ([2**40], None, "token_ids.ids[0]"),
        ([5, 6.0], None, "token_ids.ids[1]"),
        ([True], None, "token_ids.ids[0]"),
        (iter([5, "x"]), None, "token_ids.ids[1]"),
        (b"\xff", None, "text"),
        (memoryview(array("I", [5])), None, "text"),
        (None, None, "input"),
        (7, None, "input"),
        ({5: 6}, None, "input"),
        ({5, 6}, None, "input"),
        (Path("prompt.txt"), None, "input"),
        ("x", "Not A Name", "context"),
        ("\ud800", None, "text"),
        ("x", "\ud800", "context"),
    ],
)
async def test_invalid_input_names_the_field(service: Served, prompt: Any, context: str | None, field: str) -> None:
    service.engine.contexts["moby"] = [1]
    with pytest.raises(InvalidArgument) as caught:
        await collect(service.client.generate(prompt, context=context))
    assert caught.value.field == field


@pytest.mark.parametrize("context", [None, "moby"])
async def test_text_that_cannot_fit_is_refused_before_tokenization(
    service: Served, context: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "push", None)
    service.engine.contexts["moby"] = [1] * 96
    with pytest.raises(InvalidArgument, match="bytes do not fit") as caught:
        await collect(service.client.generate("a" * (1 << 20), context=context))
    assert caught.value.field == "text"
    assert ("96 of them are taken" in str(caught.value)) == (context is not None)
    assert not service.engine.prompts


async def test_unknown_option_is_named(service: Served) -> None:
    wrong: Any = {"max_tokens": 3, "temprature": 0.5}
    with pytest.raises(TypeError, match="'temprature'"):
        await anext(service.client.generate("x", **wrong))
    with pytest.raises(TypeError, match="'temprature'"):
        await anext(service.client.ask("book", "x", **wrong))
    with pytest.raises(TypeError, match="'temprature'"):
        await anext(service.client.ingest_steps("book", "x", temprature=0.5))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'temprature'"):
        await service.client.ingest("book", "x", temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'temprature'"):
        await service.client.update_context("book", temprature=0.5)  # type: ignore[call-arg]

    def plainly() -> None:
        with Client(service.address) as client:
            with pytest.raises(TypeError, match="'temprature'"):
                next(client.generate("x", **wrong))
            with pytest.raises(TypeError, match="'temprature'"):
                next(client.ask("book", "x", **wrong))
            with pytest.raises(TypeError, match="'temprature'"):
                next(client.ingest_steps("book", "x", temprature=0.5))  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="'temprature'"):
                client.ingest("book", "x", temprature=0.5)  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="'temprature'"):
                client.update_context("book", temprature=0.5)  # type: ignore[call-arg]

    await asyncio.to_thread(plainly)
    assert service.engine.prompts == []


async def test_request_without_input_is_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GenerationServiceStub(channel).Generate(service_pb.GenerateRequest()).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
