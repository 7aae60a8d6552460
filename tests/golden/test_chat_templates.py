"""The ids of a conversation are those of transformers' `apply_chat_template`, for any use of texts in templates."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.types import Message, ToolCall
from tests.support.chat_templates import (
    CONTROL,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    PASTLESS,
    TEXT_ARGUMENTS,
    THINKING,
    chat_tokenizer,
)
from tests.support.conversations import conversation_ids, piece_ids
from tests.support.sentencepiece import sentencepiece_tokenizer
from tests.support.service import END, write_model

EACH = "{% for m in messages %}"
SPACED = (
    "{{ bos_token }}"
    + EACH
    + ("{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}{% endfor %}")
)
NAMED = EACH + "{{ ('User: ' if m.role == 'user' else 'Assistant: ') + m.content }}\n{% endfor %}Assistant:"
LINES = EACH + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}{{ '<|assistant|>\n' }}"
TAIL = "{{ '\n' }}{% endfor %}{{ '<assistant>' }}"
HEAD = EACH + "{{ '<' + m.role + '>' }}"
TEXT = "{{ m.content }}"
CUTTING = HEAD + "{{ m.content.split('</think>')[-1].lstrip() }}" + TAIL
REASONING = EACH + (
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ '<think>' + m.content.split('</think>')[0].split('<think>')[-1].strip() + '</think>' }}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}" + TAIL
)
SWITCH = "{{ 'MODE no_think\n' if '/no_think' in messages[0].content else 'MODE think\n' }}" + HEAD + TEXT + TAIL
MARKED = HEAD + "{% generation %}{% set x = 1 %}" + TEXT + "{% endgeneration %}" + TAIL
TURNS = [("user", "Hi"), ("assistant", "<think>long</think>Yo"), ("user", "Bye there!")]
QUESTION = [("user", "Hi there!")]
LONG = [("system", "Be brief. /no_think"), *TURNS[:2], ("user", ""), ("assistant", " Hi\n"), ("user", "> the [INST")]
TEMPLATES = {
    "a space beside texts": SPACED,
    "a word beside texts": NAMED,
    "a new line before texts": LINES,
    "cuts out thoughts": CUTTING,
    "rewrites thoughts": REASONING,
    "looks for a flag": SWITCH,
    "marks the model's text": MARKED,
    "as JSON": HEAD + "{{ m.content | tojson }}" + TAIL,
    "skips empty messages": EACH + "{% if m.content %}{{ '<' + m.role + '>' + m.content }}{% endif %}" + TAIL,
    "asks for documents": "{% if documents is not none or tools %}DOCUMENTS{% endif %}" + HEAD + TEXT + TAIL,
    "leaves out the past": PASTLESS,
    "leaves out answers": THINKING,
    "trims": LLAMA,
}
PARTS = EACH + (
    "{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ ' ' + part.text }}{% endif %}{% endfor %}"
    "{{ '</think>\n' }}{% endfor %}"
)
"""Expects contents as lists of parts, as templates of models with images do."""
TOKENIZERS = ("bytes", "prepend", "always", "first")
PIECES = [*CONTROL[:3], END, "</think>", "<think>", "<s>", *"<[>]é🐳\n ", "{{", "\n\n", " a", "/no_think"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=5).map("".join)


def fast_tokenizer(kind: str) -> FastTokenizer:
    fast = chat_tokenizer() if kind == "bytes" else sentencepiece_tokenizer(kind)
    names = ("<think>", "</think>", "<call>")
    untyped: Any = fast
    untyped.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    return fast


def both(folder: Path, fast: FastTokenizer, template: str) -> tuple[Tokenizer, Any]:
    """Ours and that of transformers."""
    write_model(folder, fast, template)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    if fast.token_to_id("<s>") is None:
        settings |= {"bos_token": "<|begin|>", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder, DirectRenderer()), PreTrainedTokenizerFast.from_pretrained(folder)


def check(ours: Tokenizer, theirs: Any, turns: Sequence[tuple[str, str]], *, has_parts: bool = False) -> None:
    texts = [[{"type": "text", "text": text}] if has_parts else text for _, text in turns]
    messages = [{"role": role, "content": text} for (role, _), text in zip(turns, texts, strict=True)]
    kinds = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
    wanted = theirs.apply_chat_template(messages, **kinds)
    found = conversation_ids(ours, turns)
    assert theirs.convert_ids_to_tokens(found) == theirs.convert_ids_to_tokens(wanted)
    assert found == wanted


@pytest.mark.sampled(48)
@pytest.mark.parametrize("turns", [QUESTION, TURNS, LONG], ids=["question", "turns", "long"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_those_of_transformers(kind: str, template: str, turns: list[tuple[str, str]], tmp_path: Path) -> None:
    if template == PASTLESS:
        turns = [turn for turn in turns if turn[0] != "system"]
    check(*both(tmp_path / "model", fast_tokenizer(kind), template), turns)


@pytest.mark.parametrize("kind", ["bytes", "prepend"])
def test_templates_that_know_lists_of_parts_alone_are_given_them(kind: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path / "model", fast_tokenizer(kind), PARTS)
    for turns in (QUESTION, TURNS, LONG):
        check(ours, theirs, turns, has_parts=True)


@pytest.mark.parametrize("template", [SPACED, REASONING, MISTRAL], ids=["spaced", "reasoning", "mistral"])
@pytest.mark.parametrize("kind", ["bytes", "prepend"])
def test_texts_that_look_like_control_tokens_stay_texts(kind: str, template: str, tmp_path: Path) -> None:
    fast = fast_tokenizer(kind)
    ours, theirs = both(tmp_path / "model", fast, template)
    control = {token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special}
    control |= {fast.token_to_id(name) for name in ("<think>", "</think>") if name in template}

    @given(system=st.none() | TEXTS, texts=st.lists(TEXTS, min_size=1, max_size=5).filter(lambda found: len(found) % 2))
    def holds(system: str | None, texts: list[str]) -> None:
        turns = [(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
        if system is not None and template == MISTRAL:
            turns = [("system", system), *turns]
        found = conversation_ids(ours, turns)
        empty = conversation_ids(ours, [(role, "") for role, _ in turns])
        assert all(found.count(i) <= empty.count(i) + ("</think>" in str(turns)) for i in control)
        if not any(text[:1] in "]>" or text[-1:] in "<[" for _, text in turns if text):
            check(ours, theirs, turns)

    holds()


@pytest.mark.parametrize(("before", "after"), [("[", "/INST]"), ("x [/INST", "] y"), ("<|end", "|>")])
def test_a_text_and_its_template_make_no_control_token_together(before: str, after: str, tmp_path: Path) -> None:
    """The text is between the halves of one."""
    template = "{{ bos_token + '[INST]' }}" + EACH + f"{{{{ '{before}' + m.content + '{after}' }}}}{{% endfor %}}"
    fast = fast_tokenizer("bytes")
    ours, _ = both(tmp_path / "model", fast, template)
    control = {fast.token_to_id(name) for name in ("[/INST]", END)}
    for text in ("", "a"):  # the template itself makes one, which is allowed
        assert bool(control & set(conversation_ids(ours, [("user", text)]))) == (not text)
    for text in ("[/INST]", END, "|>", "<|end", "]", "[/INST"):
        found = conversation_ids(ours, [("user", text)])
        assert not control & set(found), fast.decode(found, skip_special_tokens=False)
        assert f"{before}{text}{after}" in fast.decode(found, skip_special_tokens=False)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Weather in \u201cK\u00f6ln\u201d <b>.",
            "parameters": {"type": "object", "required": [], "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "add")
]
ARGUMENTS = {"zip": 50667, "city": "K\u00f6ln", "more": [1.5, None, True, {"a": "b"}]}


@pytest.mark.parametrize(
    ("template", "has_objects", "content"),
    [(HERMES, True, ""), (TEXT_ARGUMENTS, False, None), (HARMONY, True, "")],
    ids=["hermes", "text arguments", "harmony"],
)
def test_ids_of_tools_calls_and_results_are_those_of_transformers(
    template: str, has_objects: bool, content: str | None, tmp_path: Path
) -> None:
    """The form of calls is found at the start, because templates expect different ones."""
    ours, theirs = both(tmp_path / "model", fast_tokenizer("bytes"), template)
    assert ours.chat_template is not None and ours.chat_template.supports_tools
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    function = {"name": "get_weather", "arguments": ARGUMENTS if has_objects else text}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Is it cold?"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "id": "c", "function": function}],
        },
        {"role": "tool", "content": '{"celsius": 3}', "tool_call_id": "c", "name": "get_weather"},
    ]
    kinds = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
    wanted = theirs.apply_chat_template(messages, tools=TOOLS, **kinds)
    conversation = [
        Message("user", "Is it cold?"),
        Message("assistant", "", tool_calls=(ToolCall("c", "get_weather", text),)),
        Message("tool", '{"celsius": 3}', tool_call_id="c"),
    ]
    found = piece_ids(ours, ours.chat_template.conversation(conversation, {}, TOOLS))
    assert theirs.convert_ids_to_tokens(found) == theirs.convert_ids_to_tokens(wanted)


def test_separate_template_for_tools_is_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", fast_tokenizer("bytes"), LINES)
    entries = [{"name": "default", "template": LINES}, {"name": "tool_use", "template": HERMES}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    template = Tokenizer.load(folder, DirectRenderer()).chat_template
    assert template is not None and template.supports_tools
    question = [Message("user", "Is it cold?")]
    assert "get_weather" in "".join(piece.text for piece in template.conversation(question, {}, TOOLS))
    assert "<|user|>" in "".join(piece.text for piece in template.conversation(question, {}))
