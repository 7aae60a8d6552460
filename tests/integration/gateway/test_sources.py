"""Sources of answers over HTTP, and the text that they refer to."""

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from coordinator.engine_messages import Ended, Event, Tokens
from longleaf.errors import NotFound
from tests.support.fakes.echo_model import echo_attention, echo_spans
from tests.support.gateways import opened
from tests.support.service import Served, ids, tokens

QUESTION: Any = [{"role": "user", "content": "Who?"}]
LINE = "A line of 31 bytes and an ümlaut\n"
SIZE = 64
"""Tokens of a span; the model's tokens are bytes."""
POSITION = {"label", "file", "last_file", "line_start", "line_end", "tokens", "bytes", "url"}
FIELDS = POSITION | {"share", "contrast", "drop", "text"}
PATHS = ("chat/completions", "completions")


def asking(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def requested(path: str, **more: Any) -> dict[str, Any]:
    body = {"messages": QUESTION} if path == "chat/completions" else {"prompt": "Who?"}
    return {"model": "fake:book", **body, **more}


@pytest.fixture
async def book(service: Served, tmp_path: Path) -> str:
    """The text of a context of two files."""
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(LINE * 10)
    await service.client.ingest("book", paths)
    return LINE * 20


async def post(url: str, path: str, **more: Any) -> dict[str, Any]:
    async with httpx2.AsyncClient(base_url=f"{url}/v1/", timeout=60) as client:
        answer = await client.post(path, json=requested(path, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", PATHS)
async def test_answer_has_sources_with_their_place_text_and_numbers(url: str, book: str, path: str) -> None:
    [choice] = (await post(url, path, sources={"count": 3, "confirm": True}))["choices"]
    sources = choice["sources"]
    assert 1 <= len(sources) <= 3
    content = book.encode()
    async with httpx2.AsyncClient() as client:
        for source in sources:
            assert source.keys() == FIELDS
            start, end = source["bytes"]
            assert source["text"] == content[start:end].decode().strip()
            name, place = source["label"].rsplit(":", 1)
            assert name == source["file"] and Path(name).name in ("a.txt", "b.txt")
            assert place.split("-")[0] == str(source["line_start"])
            lines = (LINE * 10).split("\n")[source["line_start"] - 1 : source["line_end"]]
            assert "\n".join(lines).find(source["text"].split("\n")[0]) >= 0
            assert 0 < source["contrast"] <= source["share"] < 1 and source["drop"] > 0
            assert source["tokens"][1] - source["tokens"][0] >= 1
            text = await client.get(source["url"])
            assert text.headers["content-type"] == "text/plain; charset=utf-8"
            assert text.text == content[start:end].decode()
    assert [source["contrast"] for source in sources] == sorted((s["contrast"] for s in sources), reverse=True)


@pytest.mark.parametrize("path", PATHS)
async def test_sources_are_only_measured_on_request(service: Served, url: str, book: str, path: str) -> None:
    for given in ({}, {"sources": False}, {"sources": None}):
        [choice] = (await post(url, path, **given))["choices"]
        assert "sources" not in choice and "annotations" not in choice.get("message", {})
        assert service.engine.prompts[-1].cuts is None
    [choice] = (await post(url, path, sources={"count": 64.0, "confirm": None, "ranking": "raw"}))["choices"]
    assert choice["sources"] and all(each["contrast"] is each["drop"] is None for each in choice["sources"])
    assert not any(prompt.is_probe for prompt in service.engine.prompts)


async def test_annotations_link_the_answer_to_its_sources(url: str, book: str) -> None:
    async with asking(url) as client:
        answer = await client.chat.completions.create(**requested("chat/completions"), extra_body={"sources": True})
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    [choice] = answer.choices
    sources: Any = choice.model_extra and choice.model_extra["sources"]
    assert choice.message.content == "Grüße" and sources and choice.message.annotations is not None
    for source, annotation in zip(sources, choice.message.annotations, strict=True):
        cited = annotation.url_citation
        assert (annotation.type, cited.title, cited.url) == ("url_citation", source["label"], source["url"])
        assert (cited.start_index, cited.end_index) == (0, len("Grüße"))
        assert cited.url.startswith(f"{url}/v1/contexts/book/text?token_start=")


@pytest.mark.parametrize("path", PATHS)
async def test_stream_ends_with_the_sources(url: str, book: str, path: str) -> None:
    [whole] = (await post(url, path, sources=True))["choices"]
    async with asking(url) as client:
        api: Any = client.chat.completions if path == "chat/completions" else client.completions
        more = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await api.create(**requested(path, **more), extra_body={"sources": True})
        chunks = [chunk.model_dump() async for chunk in stream]
    *others, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert last["finish_reason"] == "length" and last["sources"] == whole["sources"] != []
    assert not any("sources" in choice for choice in others)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]
    if path == "completions":
        Completion.model_validate(chunks[-2], strict=True)
        return
    assert last["delta"]["annotations"] == whole["message"]["annotations"]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


async def test_accumulating_client_collects_text_and_annotations(service: Served, url: str, book: str) -> None:
    service.engine.reason = "end_token"  # this client raises for answers that were cut off
    [whole] = (await post(url, "chat/completions", sources=True))["choices"]
    async with asking(url) as client:
        manager = client.chat.completions.stream(**requested("chat/completions"), extra_body={"sources": True})
        async with manager as stream:
            message = (await stream.get_final_completion()).choices[0].message
    assert message.content == "Grüße"
    annotations: Any = message.annotations
    assert [each.model_dump() for each in annotations] == whole["message"]["annotations"]


def two_answers(num_tokens: int) -> list[Event]:
    """Two samples of different lengths, whose attention differs."""
    spans, script = echo_spans((0,), num_tokens, SIZE), list[Event]()
    for sample, text in enumerate(("a", "bcde")):
        attention = tuple(echo_attention(spans, (), 3 * sample + i) for i in range(len(text)))
        script.append(Tokens(0, tokens(ids(text)), sample, attention))
    return script + [Ended("length", 9, 4, 4, 0.5, 1.5, 2.25, sample) for sample in (1, 0)]


async def test_each_choice_has_its_own_sources(service: Served, url: str, book: str) -> None:
    service.engine.answer, service.engine.script = (), tuple(two_answers(len(service.engine.contexts["book"])))
    given = {"n": 2, "sources": {"count": 2, "ranking": "raw"}}
    choices = (await post(url, "chat/completions", **given))["choices"]
    one, two = (choice["sources"] for choice in choices)
    assert one and two and one != two
    ends = [choice["message"]["annotations"][0]["url_citation"]["end_index"] for choice in choices]
    assert ends == [1, 4]
    async with asking(url) as client:
        stream = await client.chat.completions.create(
            **requested("chat/completions", stream=True, n=2), extra_body={"sources": given["sources"]}
        )
        found = {c.index: c.model_extra async for chunk in stream for c in chunk.choices if c.finish_reason}
    assert found == {0: {"sources": one}, 1: {"sources": two}}


WRONG: tuple[tuple[object, str], ...] = (
    ("yes", "sources"),
    (3, "sources"),
    ([], "sources"),
    ({"number": 3}, "sources.number"),
    ({"count": 0}, "sources.count"),
    ({"count": 65}, "sources.count"),
    ({"count": 2.5}, "sources.count"),
    ({"count": "3"}, "sources.count"),
    ({"confirm": 1}, "sources.confirm"),
    ({"ranking": "best"}, "sources.ranking"),
)


@pytest.mark.parametrize(("given", "param"), WRONG, ids=str)
async def test_invalid_request_for_sources_names_the_field(url: str, book: str, given: object, param: str) -> None:
    async with httpx2.AsyncClient(base_url=f"{url}/v1/") as client:
        for path in PATHS:
            answer = await client.post(path, json=requested(path, sources=given))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_sources_need_a_context(service: Served, url: str) -> None:
    async with asking(url) as client:
        with pytest.raises(openai.BadRequestError, match="needs a context") as raised:
            await client.chat.completions.create(model="fake", messages=QUESTION, extra_body={"sources": True})
    assert raised.value.param == "sources" and not service.engine.prompts


async def test_sources_of_token_ids_have_no_file_and_bytes(service: Served, url: str) -> None:
    service.engine.contexts["book"] = list(ids(LINE * 10))
    [choice] = (await post(url, "chat/completions", sources={"count": 1}))["choices"]
    [source] = choice["sources"]
    assert [source[name] for name in ("file", "line_start", "line_end", "bytes")] == [None] * 4
    start, end = source["tokens"]
    assert source["label"] == f"tokens {start}-{end}" and source["text"]


async def test_answer_is_returned_if_the_text_of_its_sources_is_lost(
    url: str, book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise NotFound("contexts/book")

    monkeypatch.setattr("longleaf.client.AsyncClient.get_context_text", fail)
    [choice] = (await post(url, "chat/completions", sources={"count": 1}))["choices"]
    [source] = choice["sources"]
    assert choice["message"]["content"] == "Grüße"
    assert (source["text"], source["bytes"], source["label"].split(" ")[0]) == ("", None, "tokens")


async def test_urls_of_sources_begin_with_the_public_url(service: Served, book: str) -> None:
    async with opened(service.address, public_url="https://books.example") as url:
        [choice] = (await post(url, "completions", sources={"count": 1}))["choices"]
    assert choice["sources"][0]["url"].startswith("https://books.example/v1/contexts/book/text?")


async def test_text_of_a_range_is_returned(url: str, book: str) -> None:
    async with httpx2.AsyncClient(base_url=f"{url}/v1/contexts/book/") as client:
        found = (await client.get("text", params={"byte_start": 0, "byte_end": 6})).json()
        start, end = found["token_start"], found["token_end"]
        again = (await client.get("text", params={"token_start": start, "token_end": end})).json()
        plain = await client.get("text", params={"token_start": start, "token_end": end, "format": "text"})
    assert found == again and Path(found.pop("file")).name == "a.txt"
    place = {"token_start": start, "token_end": start + 6, "byte_start": 0, "byte_end": 6, "line": 1, "last_file": ""}
    assert found == {"id": "book", "object": "context.text", "text": "A line", **place}
    assert plain.text == "A line"
    assert plain.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("given", "status", "param"),
    [
        ({}, 400, "token_start"),
        ({"token_start": "1"}, 400, "token_start"),
        ({"token_start": "2", "token_end": "1"}, 400, "token_end"),
        ({"token_start": "0", "token_end": "99999"}, 400, "token_end"),
        ({"byte_start": "0", "byte_end": "99999"}, 400, "byte_end"),
        ({"token_start": "-1", "token_end": "4"}, 400, "token_start"),
        ({"token_start": "0", "token_end": "9" * 18}, 400, "token_end"),
        ({"token_start": "0", "token_end": "9" * 19}, 400, "token_end"),
        ({"token_start": "0", "token_end": "4", "format": "html"}, 400, "format"),
        ({"token_start": "0", "token_end": "4", "what": "1"}, 400, "what"),
    ],
    ids=str,
)
async def test_invalid_text_range_is_named(url: str, book: str, given: dict[str, str], status: int, param: str) -> None:
    async with httpx2.AsyncClient(base_url=f"{url}/v1/contexts/") as client:
        answer = await client.get("book/text", params=given)
        missing = await client.get("none/text", params={"token_start": 0, "token_end": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "context_not_found")
