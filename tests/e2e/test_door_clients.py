"""Other clients that people have, each in its own words: `make clients` installs them."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from longleaf.client import Client
from longleaf.messages import Delta
from tests.support.command_line import Served, url_of
from tests.support.tools import lacks

pytestmark = pytest.mark.slow
QUESTION = "Who is called?"


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        lacks(f"{package} is not installed: make clients")


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[str, str, str]]:
    """The door's URL, the name of the book's model, and what `ask` answers."""
    with Served("--launcher", "local", "--http", "0", "--kv-bytes", "60000000") as service:
        url = url_of(service)
        path, plain = f"{url}/v1/contexts/book", {"content-type": "text/plain"}
        httpx2.post(path, content=b"Call me Ishmael. " * 40, headers=plain, timeout=60).raise_for_status()
        with Client(service.address) as client:
            told = client.ask("book", QUESTION, max_tokens=16)
            text = "".join(event.text for event in told if isinstance(event, Delta))
        yield url, httpx2.get(f"{url}/v1/models").json()["data"][1]["id"], text


def test_langchain(asked: tuple[str, str, str]) -> None:
    need("langchain_openai")
    from langchain_openai import ChatOpenAI

    url, model, text = asked
    options: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_tokens": 16, "temperature": 0}
    chat: Any = ChatOpenAI(**options)
    assert chat.invoke(QUESTION).content == text
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == text


def test_litellm(asked: tuple[str, str, str]) -> None:
    need("litellm")
    import litellm

    url, model, text = asked
    options: Any = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 16}
    messages = [{"role": "user", "content": QUESTION}]
    answer: Any = litellm.completion(model=f"openai/{model}", messages=messages, **options)
    assert answer.choices[0].message.content == text


def test_llm(asked: tuple[str, str, str]) -> None:
    need("llm")
    from llm.default_plugins.openai_models import Chat

    url, model, text = asked
    chat: Any = Chat("book", model_name=model, api_base=f"{url}/v1")
    chat.key = "none"
    assert chat.prompt(QUESTION, max_tokens=16).text() == text
