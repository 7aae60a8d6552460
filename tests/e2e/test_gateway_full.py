"""Answers through a gateway that use all remaining capacity."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from longleaf.client import Client
from longleaf.types import Finished
from tests.support.command_line import Served, url_of

BOOK = "The door of the house is green. " * 8
CAPACITY = 400
QUESTION: Any = [{"role": "user", "content": "What colour?"}]
NEVER_ENDS = {"logit_bias": {str(token): -100 for token in range(256, 264)}}
"""All tokens of the embedded model that are not bytes."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--launcher", "local", "--http", "0", "--kv-bytes", "8000000") as service:
        yield service
        assert service.stop() == 0


@pytest.fixture(scope="module")
def openai(served: Served) -> Iterator[OpenAI]:
    url = url_of(served)
    path = f"{url}/v1/contexts/book?capacity={CAPACITY}"
    answer = httpx2.post(path, content=BOOK.encode(), headers={"content-type": "text/plain"}, timeout=60)
    assert answer.status_code == 200 and '"ready"' in answer.text
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def create(openai: OpenAI) -> Any:
    return openai.chat.completions.create


@pytest.fixture
def models(openai: OpenAI) -> list[str]:
    """The model and the book."""
    return [each.id for each in openai.models.list()]


def test_answer_that_fills_its_context_ends_with_length(create: Any, models: list[str]) -> None:
    answer = create(model=models[1], messages=QUESTION, **NEVER_ENDS)
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", CAPACITY)
    stream = create(
        model=models[1], messages=QUESTION, stream=True, stream_options={"include_usage": True}, **NEVER_ENDS
    )
    *chunks, end, last = stream
    assert (end.choices[0].finish_reason, last.usage.total_tokens) == ("length", CAPACITY)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


def test_client_that_requests_the_remaining_length_gets_it(served: Served, create: Any) -> None:
    with Client(served.address) as client:
        *_, end = client.ask("book", "What colour?", until_full=True, ignore_end_token=True)
    assert isinstance(end, Finished) and end.reason == "length"
    assert end.usage.prompt_tokens + end.usage.completion_tokens == CAPACITY


@pytest.mark.parametrize("num_answers", [1, 3])
def test_concurrent_answers_use_at_most_an_eighth_of_the_pools(
    served: Served, create: Any, models: list[str], num_answers: int
) -> None:
    with Client(served.address) as client:
        room = client.cluster().workers[0].max_tokens // 8
    answer = create(model=models[0], messages=QUESTION, n=num_answers, **NEVER_ENDS)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * num_answers
    assert answer.usage.completion_tokens == room // num_answers * num_answers


def test_answers_that_do_not_fit_together_are_queued(create: Any, models: list[str]) -> None:
    def ask(number: int) -> str:
        return create(model=models[number % 2], messages=QUESTION, **NEVER_ENDS).choices[0].finish_reason

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(ask, range(12))) == ["length"] * 12


def test_question_that_leaves_no_capacity_for_an_answer_is_refused(openai: OpenAI, models: list[str]) -> None:
    body = {"model": models[1], "messages": [{"role": "user", "content": "What colour? " * 40}]}
    answer = httpx2.post(f"{openai.base_url}chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages") and f"{CAPACITY} positions" in error["message"]
