"""The openai package as a client of a gateway."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from coordinator.engine_messages import Ended, Tokens
from longleaf.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from longleaf.sampling import Logprobs, SamplingParams, Token, TokenLogprob
from tests.support.gateways import opened
from tests.support.service import BYTES, END, FakeEngine, Served, ids, serving, tokens

QUESTION: Any = [{"role": "user", "content": "Who?"}]


def asking(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_models_list_the_model_and_its_contexts(service: Served, url: str) -> None:
    service.engine.contexts["book"] = [1, 2]
    async with asking(url) as client:
        assert [model.id async for model in await client.models.list()] == ["fake", "fake:book"]
        book = await client.models.retrieve("fake:book")
        assert (book.id, book.model_extra and book.model_extra["max_model_len"]) == ("fake:book", 4096)
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("fake:none")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


async def test_chat_completion_is_returned_whole(service: Served, url: str) -> None:
    async with asking(url) as client:
        answer = await client.chat.completions.create(model="fake", messages=QUESTION, max_tokens=9)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Grüße", "length")
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.prompt_tokens + len(ids("Grüße"))
    assert answer.model_extra == {"exact": True}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_inexact_answer_gives_the_reason(service: Served, url: str, path: str) -> None:
    service.engine.exactness_note = "not verified"
    requested = {"messages": QUESTION} if path == "chat/completions" else {"prompt": "who?"}
    async with httpx2.AsyncClient(base_url=f"{url}/v1/") as client:
        whole = await client.post(path, json={"model": "fake", "max_tokens": 9, **requested})
        stream = await client.post(
            path,
            json={
                "model": "fake",
                "max_tokens": 9,
                "stream": True,
                "stream_options": {"include_usage": True},
                **requested,
            },
        )
        cluster = await client.get("cluster", params={"once": "true"})
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
    answer = [chunk for chunk in map(json.loads, lines) if "exact" in chunk]
    assert len(answer) == 2
    for found in (whole.json(), cluster.json(), *answer):
        assert (found["exact"], found["exactness_note"]) == (False, "not verified")


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_answer_names_the_dequantization_of_the_weights(service: Served, url: str, path: str) -> None:
    note = service.engine.dequantization = "fp8 128x128 checkpoint, computed in bfloat16"
    body = {"model": "fake", "max_tokens": 9}
    body |= {"messages": QUESTION} if path == "chat/completions" else {"prompt": "who?"}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx2.AsyncClient(base_url=f"{url}/v1/") as client:
        whole = await client.post(path, json=body)
        stream = await client.post(path, json=body | streamed)
        cluster = await client.get("cluster", params={"once": "true"})
        service.engine.dequantization = ""
        plain = await client.post(path, json=body)
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
    chunks = [chunk for chunk in map(json.loads, lines) if "exact" in chunk]
    assert len(chunks) == 2
    for found in (whole.json(), cluster.json(), *chunks):
        assert (found["exact"], found["dequantization"]) == (True, note)
    assert "dequantization" not in plain.json()


async def test_synchronous_client_streams(url: str) -> None:
    def stream() -> str:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            chunks = client.chat.completions.create(model="fake", messages=QUESTION, stream=True)
            return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    assert await asyncio.to_thread(stream) == "Grüße"


async def test_every_chat_chunk_matches_the_openai_type(service: Served, url: str) -> None:
    async with asking(url) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Grüße"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_context_is_named_by_the_model_or_a_separate_field(service: Served, url: str) -> None:
    service.engine.contexts["book"] = list(ids("long"))
    async with asking(url) as client:
        for model, more in (("fake:book", {}), ("fake", {"context": "book"}), ("fake:book", {"context": "book"})):
            await client.chat.completions.create(model=model, messages=QUESTION, extra_body=more)
            assert service.engine.prompts[-1].context == "book"
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="fake:book", messages=QUESTION, extra_body={"context": "other"})
        assert raised.value.param == "context"
        for model, more in (("fake:other", {}), ("fake", {"context": "other"}), ("gpt", {})):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model=model, messages=QUESTION, extra_body=more)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "context" if more else "model")


async def test_all_request_fields_reach_the_engine(service: Served, url: str) -> None:
    async with asking(url) as client:
        await client.chat.completions.create(
            model="fake",
            messages=[{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Who?"}],
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.25,
            seed=3,
            stop=["x", "y"],
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": 1},
            user="anna",
            store=True,
            extra_body={"top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "priority": 2, "metadata": None},
        )
    prompt, sampling = service.engine.prompts[-1], service.engine.prompts[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.25, 3)
    assert (sampling.stop, sampling.presence_penalty, sampling.frequency_penalty) == (("x", "y"), 0.5, -0.5)
    assert (sampling.logit_bias, sampling.top_k, sampling.min_p) == ({5: 1.0}, 4, 0.125)
    assert (sampling.repetition_penalty, prompt.scheduling.priority, prompt.scheduling.client) == (1.5, 2, "anna")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"top_p": 0}, "top_p", 0.0),
        ({"seed": -1}, "seed", (1 << 64) - 1),
        ({"seed": -(1 << 63)}, "seed", 1 << 63),
        ({"seed": 3.0}, "seed", 3),
        ({"max_tokens": 8.0}, "max_tokens", 8),
        ({"max_tokens": None, "max_completion_tokens": 8.0}, "max_tokens", 8),
        ({"max_tokens": None, "max_completion_tokens": 8}, "max_tokens", 8),
        ({"top_k": 4.0}, "top_k", 4),
        ({"logprobs": True, "top_logprobs": 2.0}, "num_logprobs", 2),
        ({"temperature": 1}, "temperature", 1.0),
        ({"logit_bias": {"5": 1}}, "logit_bias", {5: 1.0}),
    ],
    ids=str,
)
async def test_numbers_are_parsed_like_openai(
    service: Served, url: str, given: dict[str, Any], field: str, value: object
) -> None:
    body = {"model": "fake", "messages": QUESTION, **given}
    async with httpx2.AsyncClient(base_url=f"{url}/v1") as client:
        answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert getattr(service.engine.prompts[-1].sampling, field) == value


async def test_template_variables_are_sent_in_the_body(tmp_path: Path) -> None:
    engine, template = FakeEngine(), "{{ messages[0].content }}{{ '' if enable_thinking else 'no thoughts' }}"
    engine.answer = (ids("So"),)
    async with (
        serving(engine, tmp_path / "model", template=template) as (_, address),
        opened(address) as url,
        asking(url) as client,
    ):
        for value, wanted in ((True, "Who?"), (False, "Who?no thoughts")):
            body = {"chat_template_kwargs": {"enable_thinking": value}}
            messages = [{"role": "user", "content": "Who?"}]
            await client.chat.completions.create(model="fake", messages=messages, extra_body=body)  # type: ignore[arg-type]
            assert list(engine.prompts[-1].token_ids) == list(ids(wanted))


async def test_omitted_fields_use_service_defaults(tmp_path: Path) -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.25)
    engine = FakeEngine()
    engine.answer = (ids("So"),)
    async with (
        serving(engine, tmp_path / "model", sampling_defaults=defaults) as (_, address),
        opened(address) as url,
        asking(url) as client,
    ):
        await client.chat.completions.create(model="fake", messages=QUESTION)
        await client.chat.completions.create(model="fake", messages=QUESTION, temperature=0)
    first, second = (prompt.sampling for prompt in engine.prompts)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.6, 0.95, 20, 1.25)
    assert second.is_greedy and second.repetition_penalty == 1.25


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_null_length_uses_the_remaining_capacity(service: Served, url: str, path: str) -> None:
    body = {"model": "fake", "max_tokens": None} | (
        {"messages": QUESTION} if path == "/chat/completions" else {"prompt": "So"}
    )
    async with httpx2.AsyncClient(base_url=f"{url}/v1") as client:
        assert (await client.post(path, json=body)).status_code == 200
    prompt = service.engine.prompts[-1]
    assert prompt.sampling.max_tokens == service.engine.max_positions - len(prompt.token_ids)


async def test_answer_may_use_all_remaining_capacity(service: Served, url: str) -> None:
    async with asking(url) as client:
        await client.chat.completions.create(model="fake", messages=QUESTION)
    prompt = service.engine.prompts[-1]
    assert prompt.sampling.max_tokens == service.engine.max_positions - len(prompt.token_ids)


async def test_logprobs_are_returned_in_both_formats(service: Served, url: str) -> None:
    (token,) = ids("a")
    reported = Logprobs(-0.5, (TokenLogprob(token, -0.5, b"a"),), b"a")
    service.engine.answer, service.engine.script = (), (Tokens(0, (Token(token, reported),)),)
    service.engine.late_error = Unavailable("over")
    async with asking(url) as client:
        chunks = await client.chat.completions.create(
            model="fake", messages=QUESTION, logprobs=True, top_logprobs=1, stream=True
        )
        logprobs: Any = None

        async def read() -> None:
            nonlocal logprobs
            async for chunk in chunks:
                logprobs = (chunk.choices[0].logprobs if chunk.choices else None) or logprobs

        with pytest.raises(openai.APIError, match="over"):  # a failure after the first byte is an event
            await read()
    assert logprobs is not None and logprobs.content is not None
    assert (logprobs.content[0].bytes, logprobs.content[0].top_logprobs[0].logprob) == ([97], -0.5)


def special(name: str) -> int:
    return next(number for token, number in BYTES.get_vocab().items() if token == name)


def scripted_answer(content: str, *others: int) -> tuple[Tokens | Ended, ...]:
    """Engine events of an answer with these tokens and the end token, each the most likely, followed by `others`."""
    reported = list[Token]()
    for token in (*ids(content), special(END)):
        tops = [TokenLogprob(each, -0.5 * (i + 1)) for i, each in enumerate((token, *others))]
        reported.append(Token(token, Logprobs(-0.5, tuple(tops))))
    return Tokens(0, tuple(reported)), Ended("end_token", 3, 0, len(reported), 0.5, 1.5, 2.25)


async def test_tokens_of_partial_characters_are_given_as_bytes(service: Served, url: str) -> None:
    """Text offsets count characters, whether the tokens arrive together or separately."""
    service.engine.answer, service.engine.script = (), scripted_answer("aдb", *ids("д"))
    requested: Any = {"model": "fake", "prompt": "So", "logprobs": 3}
    async with asking(url) as client:
        logprobs = (await client.completions.create(**requested)).choices[0].logprobs
        chunks = [
            chunk.choices[0].logprobs async for chunk in await client.completions.create(**requested, stream=True)
        ]
    assert logprobs is not None and logprobs.top_logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "bytes:\\xd0", "bytes:\\xb4", "b"], [0, 1, 1, 2])
    assert logprobs.top_logprobs[0] == {"a": -0.5, "bytes:\\xd0": -1.0, "bytes:\\xb4": -1.5}
    parts = [chunk for chunk in chunks if chunk is not None]
    for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [each for part in parts for each in getattr(part, field)] == getattr(logprobs, field)


async def test_tokens_with_equal_text_are_all_listed(service: Served, url: str) -> None:
    begin, end = (special(name) for name in ("<|begin|>", END))
    service.engine.answer, service.engine.script = (), scripted_answer("a", begin, end)
    async with asking(url) as client:
        answer = await client.completions.create(model="fake", prompt="So", logprobs=3)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5, "": -1.0, f"token_id:{end}": -1.5}]


async def test_logprob_of_minus_infinity_is_a_number(service: Served, url: str) -> None:
    """JSON has no infinities, and OpenAI's type has no null."""
    other, token = ids("ab")
    tops = (TokenLogprob(other, 0.0), TokenLogprob(token, -math.inf))
    reported = Tokens(0, (Token(token, Logprobs(-math.inf, tops)),))
    service.engine.answer, service.engine.script = (), (reported, Ended("length", 3, 0, 1, 0.5, 1.5, 2.25))
    async with asking(url) as client:
        chat = await client.chat.completions.create(model="fake", messages=QUESTION, logprobs=True, top_logprobs=2)
        text = await client.completions.create(model="fake", prompt="So", logprobs=2)
    ChatCompletion.model_validate(chat.model_dump(), strict=True)
    Completion.model_validate(text.model_dump(), strict=True)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    [entry] = chat.choices[0].logprobs.content
    assert (entry.logprob, [top.logprob for top in entry.top_logprobs]) == (-9999.0, [0.0, -9999.0])
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.token_logprobs, logprobs.top_logprobs) == ([-9999.0], [{"a": 0.0, "b": -9999.0}])


async def test_line_separators_do_not_split_events(service: Served, url: str) -> None:
    """Clients that split a stream with str.splitlines, as httpx's iter_lines does, see whole events."""
    text = "a\u2028b\u2029c\x85d"
    service.engine.answer = tuple(ids(character) for character in text)
    body = {"model": "fake", "messages": QUESTION, "stream": True}
    async with httpx2.AsyncClient(base_url=f"{url}/v1") as client:
        answer = await client.post("/chat/completions", json=body)
        whole = await client.post("/chat/completions", json=body | {"stream": False})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == text
    assert whole.json()["choices"][0]["message"]["content"] == text


async def test_end_token_has_no_entry(service: Served, url: str) -> None:
    service.engine.answer, service.engine.script = (), scripted_answer("ab")
    requested: Any = {"model": "fake", "messages": QUESTION, "logprobs": True}
    async with asking(url) as client:
        answer = await client.chat.completions.create(**requested)
        chunks = [chunk async for chunk in await client.chat.completions.create(**requested, stream=True)]
        text = await client.completions.create(model="fake", prompt="So", logprobs=0)
    reported = [answer.choices[0].logprobs, *(choice.logprobs for chunk in chunks for choice in chunk.choices)]
    entries = [[entry.token for entry in each.content or ()] for each in reported if each is not None]
    assert entries[0] == ["a", "b"] == [token for each in entries[1:] for token in each] and all(entries)
    assert text.choices[0].logprobs is not None and text.choices[0].logprobs.tokens == ["a", "b"]


ANSWERS = ("Grüße", "", "No")


def three(num_samples: int) -> list[Tokens | Ended]:
    """The engine's interleaved events for several answers; longer ones end later."""
    turns: list[Tokens | Ended] = []
    for place in range(max(map(len, map(ids, ANSWERS)))):
        for sample, text in enumerate(ANSWERS[:num_samples]):
            turns += [Tokens(place, tokens((token,)), sample) for token in ids(text)[place : place + 1]]
    for sample in reversed(range(num_samples)):
        reason = "length" if sample == 1 else "stop_token"
        turns.append(Ended(reason, 9, 4, len(ids(ANSWERS[sample])), 0.5, 1.5, 2.25, sample))
    return turns


@pytest.mark.parametrize("num_samples", [2, 3])
async def test_several_answers_stream_interleaved(service: Served, url: str, num_samples: int) -> None:
    service.engine.answer, service.engine.script = (), tuple(three(num_samples))
    body = {"model": "fake", "n": num_samples, "stream": True, "stream_options": {"include_usage": True}}
    num_output = sum(len(ids(text)) for text in ANSWERS[:num_samples])
    async with httpx2.AsyncClient(base_url=f"{url}/v1") as client:
        for path, more in (("/chat/completions", {"messages": QUESTION}), ("/completions", {"prompt": "Who?"})):
            lines = (await client.post(path, json=body | more)).text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            for sample in range(num_samples):
                own = [choice for choice in choices if choice["index"] == sample]
                pieces = [choice.get("text", choice.get("delta", {}).get("content", "")) for choice in own]
                reasons = [choice["finish_reason"] for choice in own]
                assert "".join(pieces) == ANSWERS[sample]
                assert reasons == [None] * (len(own) - 1) + ["length" if sample == 1 else "stop"]
                assert "messages" not in more or own[0]["delta"]["role"] == "assistant"
            assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == {
                "prompt_tokens": 9,
                "completion_tokens": num_output,
                "total_tokens": 9 + num_output,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                    "reasoning_tokens": 0,
                },
            }


async def test_accepted_drafts_are_reported_as_predictions(service: Served, url: str) -> None:
    output = [Tokens(0, tokens(ids("ab")), sample, (), 7, 1 + sample) for sample in range(2)]
    service.engine.answer = ()
    service.engine.script = (*output, *(Ended("length", 9, 4, 2, 0.0, 0.0, 0.0, sample) for sample in range(2)))
    async with asking(url) as client:
        answer = await client.chat.completions.create(model="fake", messages=QUESTION, n=2)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    reported = answer.usage.completion_tokens_details
    assert (
        answer.usage.completion_tokens,
        reported.accepted_prediction_tokens,
        reported.rejected_prediction_tokens,
    ) == (
        4,
        3,
        11,
    )


async def test_every_text_chunk_matches_the_openai_type(service: Served, url: str) -> None:
    """Except `finish_reason`: the package's type has no null, which OpenAI sends in all chunks but a choice's last."""
    service.engine.answer, service.engine.script = (), scripted_answer("aдb", *ids("д"))
    requested: Any = {"model": "fake", "prompt": "So", "logprobs": 3, "stream": True}
    async with asking(url) as client:
        stream = await client.completions.create(**requested, stream_options={"include_usage": True})
        chunks = [chunk.model_dump() async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    for choice in choices[:-1]:
        choice["finish_reason"] = "stop"
    for chunk in chunks:
        Completion.model_validate(chunk, strict=True)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(ids("aдb")) + 1


async def test_failure_after_the_first_byte_is_an_error_event(service: Served, url: str) -> None:
    service.engine.late_error = Unavailable("over")
    async with httpx2.AsyncClient(base_url=f"{url}/v1") as client:
        for path, requested in (("/chat/completions", {"messages": QUESTION}), ("/completions", {"prompt": "Who?"})):
            message = (await client.post(path, json={"model": "fake", "stream": True, **requested})).text.strip()
            assert message.split("\n\n")[-1].startswith('event: error\ndata: {"error":{"message":"over"')
    async with asking(url) as openais:
        stream = await openais.completions.create(model="fake", prompt="Who?", stream=True)
        with pytest.raises(openai.APIError, match="over"):
            [chunk async for chunk in stream]


async def test_text_completion_is_returned(service: Served, url: str) -> None:
    async with asking(url) as client:
        answer = await client.completions.create(model="fake", prompt="So", max_tokens=5)
        Completion.model_validate(answer.model_dump(), strict=True)
        assert (answer.choices[0].text, tuple(service.engine.prompts[-1].token_ids[-2:])) == ("Grüße", ids("So"))
        chunks = [chunk async for chunk in await client.completions.create(model="fake", prompt=[1, 2], stream=True)]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Grüße"
        assert tuple(service.engine.prompts[-1].token_ids) == (1, 2)


async def test_errors_match_the_openai_format(service: Served, url: str) -> None:
    cases = (
        (ResourceExhausted("queue", "is full", 3.0), openai.RateLimitError, "rate_limit_exceeded", "3", None),
        (ResourceExhausted("quota", "is used up"), openai.RateLimitError, "insufficient_quota", None, "false"),
        (Unavailable("gone", 2.0), openai.InternalServerError, "unavailable", "2", None),
        (FailedPrecondition("contexts/x", "is"), openai.ConflictError, "failed_precondition", None, "false"),
        (AlreadyExists("contexts/x"), openai.ConflictError, "already_exists", None, "false"),
        (AlreadyExists("generations/x"), openai.ConflictError, "already_exists", "1", None),
        (InvalidArgument("sampling.top_k", "must be"), openai.BadRequestError, "invalid_value", None, "false"),
    )
    async with asking(url) as client:
        for error, kind, code, retry, should_retry in cases:
            service.engine.error = error
            with pytest.raises(kind) as raised:
                await client.chat.completions.create(model="fake", messages=QUESTION, stream=True)
            headers = raised.value.response.headers
            found = (raised.value.code, headers.get("retry-after"), headers.get("x-should-retry"))
            assert found == (code, retry, should_retry)


async def test_sdk_does_not_retry_permanent_errors(service: Served, url: str) -> None:
    service.engine.error = FailedPrecondition("contexts/x", "is elsewhere")
    statuses: list[int] = []

    async def count(response: httpx2.Response) -> None:
        statuses.append(response.status_code)

    async with httpx2.AsyncClient(event_hooks={"response": [count]}) as http:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2, http_client=http)
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="fake", messages=QUESTION)
    assert statuses == [409]


async def test_disconnected_client_ends_the_generation(service: Served, url: str) -> None:
    service.engine.is_endless = True
    async with asking(url) as client:
        async with await client.chat.completions.create(model="fake", messages=QUESTION, stream=True) as stream:
            async for _ in stream:
                break
        await asyncio.wait_for(service.engine.streams[0].closed.wait(), 10)
        service.engine.opened.clear()
        whole = asyncio.create_task(client.chat.completions.create(model="fake", messages=QUESTION))
        await asyncio.wait_for(service.engine.opened.wait(), 10)
        whole.cancel()
        await asyncio.wait_for(service.engine.streams[1].closed.wait(), 10)
