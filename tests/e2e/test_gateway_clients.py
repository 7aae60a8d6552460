"""Third-party clients with their own APIs; `make clients` installs them."""

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2
import pytest

from longleaf.client import Client
from longleaf.types import Delta
from tests.support.command_line import Served, url_of
from tests.support.tools import lacks

pytestmark = pytest.mark.slow
QUESTION = "Who is called?"
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 7}
"""Other settings than greedy sampling."""


class Book(NamedTuple):
    """A context behind a gateway."""

    url: str
    model: str
    """Name of the book at the gateway."""
    greedy: str
    drawn: str
    """The answers of `ask` at temperature 0 and with `DRAWN`."""


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        lacks(f"{package} is not installed: make clients")


def text_of(client: Client, **options: Any) -> str:
    events = client.ask("book", QUESTION, max_tokens=16, **options)
    return "".join(event.text for event in events if isinstance(event, Delta))


@pytest.fixture(scope="module")
def book() -> Iterator[Book]:
    with Served("--launcher", "local", "--http", "0", "--kv-bytes", "60000000") as service:
        url = url_of(service)
        path, plain = f"{url}/v1/contexts/book", {"content-type": "text/plain"}
        httpx2.post(path, content=b"Call me Ishmael. " * 40, headers=plain, timeout=60).raise_for_status()
        with Client(service.address) as client:
            greedy, drawn = text_of(client), text_of(client, **DRAWN)
        assert greedy != drawn
        yield Book(url, httpx2.get(f"{url}/v1/models").json()["data"][1]["id"], greedy, drawn)


def test_langchain(book: Book) -> None:
    need("langchain_openai")
    from langchain_openai import ChatOpenAI

    for sampling, text in (({"temperature": 0}, book.greedy), (DRAWN, book.drawn)):
        options: Any = {"base_url": f"{book.url}/v1", "api_key": "none", "model": book.model, "max_tokens": 16}
        chat: Any = ChatOpenAI(**options, **sampling)
        assert chat.invoke(QUESTION).content == text
        assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == text


def test_litellm(book: Book) -> None:
    need("litellm")
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    for sampling, text in (({}, book.greedy), (DRAWN, book.drawn)):
        options: Any = {"api_base": f"{book.url}/v1", "api_key": "none", "max_tokens": 16, "messages": messages}
        options |= {"model": f"openai/{book.model}", **sampling}
        answer: Any = litellm.completion(**options)
        assert answer.choices[0].message.content == text
        chunks: Any = litellm.completion(**options, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_llm(book: Book) -> None:
    need("llm")
    from llm.default_plugins.openai_models import Chat

    chat: Any = Chat("book", model_name=book.model, api_base=f"{book.url}/v1")
    chat.key = "none"
    for sampling, text in (({}, book.greedy), (DRAWN, book.drawn)):
        assert chat.prompt(QUESTION, max_tokens=16, **sampling).text() == text
