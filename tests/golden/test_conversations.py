"""Conversations become the ids that transformers makes of them with the same template, where texts end at tokens."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from coordinator.text.renderer import Renderer
from coordinator.text.tokenizer import Tokenizer
from tests.support.chat_templates import CHATML, FOLDING, GEMMA, LLAMA, MISTRAL, chat_tokenizer
from tests.support.service import END, encoded, write_model

SYSTEM, QUESTION, ANSWER = (
    ("system", "Speak like a whaler."),
    ("user", "Who is Ahab?"),
    ("assistant", "Captain of a ship."),
)
LATER, AGAIN, LAST = ("user", "Which one?"), ("assistant", "The Pequod. Ġ 🐳"), ("user", "What is he after, and why?")
LONG = [QUESTION, ANSWER, LATER, AGAIN, LAST]
CASES = [
    (LLAMA, [QUESTION]),
    (LLAMA, LONG),
    (LLAMA, [SYSTEM, *LONG]),
    (CHATML, [QUESTION]),
    (CHATML, LONG),
    (CHATML, [SYSTEM, QUESTION]),
    (CHATML, [QUESTION, LATER, SYSTEM, SYSTEM, AGAIN, ANSWER, LAST]),
    (CHATML, [SYSTEM, *LONG[:-1] * 5, LAST]),
    (GEMMA, LONG),
    (FOLDING, [SYSTEM, *LONG]),
    (MISTRAL, LONG),
    (MISTRAL, [SYSTEM, QUESTION]),
]


@pytest.mark.parametrize(("template", "turns"), CASES)
def test_ids_are_those_of_transformers(template: str, turns: list[tuple[str, str]], tmp_path: Path) -> None:
    fast = chat_tokenizer()
    tokenizer = Tokenizer.load(write_model(tmp_path / "model", fast, template), Renderer().render)
    parts = tokenizer.shapes.make(tuple(role for role, _ in turns))
    encoders = tokenizer.conversation_encoders(parts, has_context=False)
    found = [i for encoder, (_, text) in zip(encoders, turns, strict=True) for i in encoded(encoder, text)]
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<|begin|>", eos_token=END)
    messages = [{"role": role, "content": text} for role, text in turns]
    text = theirs.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    assert text.endswith(tokenizer.decode(parts[-1], keep_special=True))
    assert all(said in text for _, said in turns)
    assert found == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.decode(found, keep_special=True) == text


def test_the_date_is_the_one_of_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", chat_tokenizer(), LLAMA)
    tokenizer = Tokenizer.load(folder, Renderer(now=datetime(2026, 12, 31, 23, 59)).render)
    for shape in (("user",), ("system", "user"), ("user", "user", "user")):
        assert "Today Date: 31 Dec 2026" in tokenizer.decode(tokenizer.shapes.make(shape)[0], keep_special=True)
