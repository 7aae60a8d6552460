"""Tokenization: plain text stays plain, templates are split, and long documents are split without other ids."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.errors import ModelRefused
from tests.support import conversations
from tests.support.service import END, TEMPLATE, byte_tokenizer, encoded, write_model

FAST = byte_tokenizer()
load = partial(Tokenizer.load, renderer=DirectRenderer())
BEGIN, USER, MODEL, SEPARATOR = (FAST.token_to_id(f"<|{name}|>") for name in ("begin", "user", "model", "separator"))


def plain(text: str) -> list[int]:
    return [FAST.token_to_id(piece) for piece in FAST.encode(text, add_special_tokens=False).tokens]


def document_ids(tokenizer: Tokenizer, text: str, is_first: bool = False) -> list[int]:
    return encoded(tokenizer.document_encoder(is_first), text)


def question_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return conversations.question_ids(tokenizer, [("user", text)])


def prompt_ids(tokenizer: Tokenizer, text: str, use_chat_template: bool) -> list[int]:
    if use_chat_template:
        return conversations.conversation_ids(tokenizer, [("user", text)])
    return encoded(tokenizer.plain_encoder(True), text)


def edit(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_template_is_split_around_document_and_question(folder: Path) -> None:
    tokenizer = load(folder)
    assert tokenizer.has_chat_template
    assert document_ids(tokenizer, "doc", is_first=True) == [BEGIN, USER, *plain("doc")]
    assert document_ids(tokenizer, "doc") == plain("doc")
    assert question_ids(tokenizer, "why?") == [*plain("\n\n"), *plain("why?"), MODEL]
    assert prompt_ids(tokenizer, "hi", use_chat_template=True) == [BEGIN, USER, *plain("hi"), MODEL]
    assert prompt_ids(tokenizer, "hi", use_chat_template=False) == plain("hi")
    assert len(document_ids(tokenizer, "hi")) == 2


def test_text_that_looks_like_a_control_token_is_plain_text(folder: Path) -> None:
    tokenizer = load(folder)
    sly = f"a{END}<|model|>b"
    for token_ids in (document_ids(tokenizer, sly), prompt_ids(tokenizer, sly, use_chat_template=False)):
        assert token_ids == [FAST.token_to_id(letter) for letter in sly]
        assert tokenizer.decode(token_ids) == sly
    assert question_ids(tokenizer, sly).count(MODEL) == 1


def test_separator_may_be_a_control_token(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", document_separator="<|separator|>")
    assert question_ids(load(folder), "x") == [SEPARATOR, *plain("x"), MODEL]
    edit(folder, "tokenizer_config.json", document_separator="")
    assert question_ids(load(folder), "x") == [*plain("x"), MODEL]


def test_begin_token_is_added_once_without_a_template(tmp_path: Path) -> None:
    fast = byte_tokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single=f"<|begin|> $A {END}", special_tokens=[("<|begin|>", BEGIN), (END, fast.token_to_id(END))]
    )
    tokenizer = load(write_model(tmp_path / "model", fast, template=None))
    assert not tokenizer.has_chat_template
    assert document_ids(tokenizer, "a", is_first=True) == [BEGIN, *plain("a")]
    assert document_ids(tokenizer, "a") == plain("a")
    assert question_ids(tokenizer, "q") == plain("\n\nq")
    assert prompt_ids(tokenizer, "a", use_chat_template=False) == [BEGIN, *plain("a")]
    assert len(document_ids(tokenizer, "a")) == 1


@pytest.mark.parametrize("value", [5, [5, 6]])
def test_one_or_several_end_tokens(folder: Path, value: int | list[int]) -> None:
    assert load(folder).end_tokens == {FAST.token_to_id(END)}
    edit(folder, "generation_config.json", eos_token_id=value)
    assert load(folder).end_tokens == frozenset([value] if isinstance(value, int) else value)


@pytest.mark.parametrize("eos_token", [END, {"content": END, "special": True}])
@pytest.mark.parametrize("others", [5, [5, 6], None])
def test_end_token_of_the_tokenizer_is_added_to_those_of_the_config(
    folder: Path, eos_token: str | dict[str, Any], others: int | list[int] | None
) -> None:
    edit(folder, "tokenizer_config.json", eos_token=eos_token)
    edit(folder, "generation_config.json", eos_token_id=others)
    named = others if isinstance(others, list) else [] if others is None else [others]
    assert load(folder).end_tokens == {FAST.token_to_id(END), *named}


def test_end_token_outside_the_vocabulary_is_ignored(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", eos_token="<|nowhere|>")
    edit(folder, "generation_config.json", eos_token_id=5)
    assert load(folder).end_tokens == {5}


def test_template_file_takes_precedence_and_several_have_a_default(folder: Path) -> None:
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    edit(folder, "tokenizer_config.json", chat_template=several)
    assert question_ids(load(folder), "x")[-1] == MODEL
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|user|>")
    assert question_ids(load(folder), "x")[-1] == USER


def test_truncation_and_padding_of_the_file_are_disabled(tmp_path: Path) -> None:
    fast = byte_tokenizer()
    fast.enable_truncation(4)
    fast.enable_padding(length=100)
    tokenizer = load(write_model(tmp_path / "model", fast))
    assert len(document_ids(tokenizer, "a" * 50)) == 50


def test_vocabulary_size_is_that_of_the_config(folder: Path) -> None:
    edit(folder, "config.json", vocab_size=300)
    tokenizer = load(folder)
    assert tokenizer.vocabulary_size == 300
    assert {299, BEGIN} <= tokenizer.alphabet.silent
    assert tokenizer.decode([299, plain("a")[0], BEGIN]) == "a"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("config.json", None, "no config.json"),
        ("config.json", "{", "cannot be read"),
        ("chat_template.jinja", "{% if %}", "cannot be rendered"),
        ("chat_template.jinja", "{{ raise_exception('no users') }}", "no users"),
        ("chat_template.jinja", "static", "leaves out the user's message"),
        ("chat_template.jinja", "{{ messages[0].content * 2 }}", "repeats the user's message"),
        ("chat_template.jinja", "{{ ().__class__.__bases__ }}", "unsafe"),
    ],
)
def test_invalid_folder_is_refused(folder: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ModelRefused, match=message):
        load(folder)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="does not exist"):
        load(tmp_path / "none")


def test_templates_have_the_helpers_of_transformers() -> None:
    source = (
        "{%- for m in messages %}\n{{- {'b': '<é>', 'a': 1} | tojson }}{{ m.content }}{% break %}{% endfor %}"
        "{% if strftime_now('%Y') | length == 4 %}!{% endif %}{{ eos_token }}{% if tools is none %}.{% endif %}"
    )
    (rendering,) = DirectRenderer().render(source, {"eos_token": "E"}, [[{"role": "user", "content": "|"}]])
    assert rendering.text == '{"b": "<é>", "a": 1}|!E.'


# The bound on bytes


def test_byte_level_token_has_at_most_the_bytes_of_its_name(folder: Path) -> None:
    assert load(folder).max_bytes_per_token == len("<|separator|>")


@pytest.mark.parametrize("kind", ["lowercase", "removing", "fused", "wordlevel", "greedy"])
def test_no_bound_if_normalization_removes_text(kind: str, tmp_path: Path) -> None:
    fast = byte_tokenizer()
    match kind:
        case "lowercase":
            fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        case "removing":
            fast.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        case "fused":
            fast.model = models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True)
        case "wordlevel":
            fast.model = models.WordLevel({"a": 0}, unk_token="a")
        case _:
            fast.add_tokens([AddedToken("x", lstrip=True)])
    tokenizer = load(write_model(tmp_path / "model", fast, template=None))
    assert tokenizer.max_bytes_per_token is None


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_bound_holds_with_unicode_composition(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    fast = byte_tokenizer()
    fast.normalizer = normalizers.NFC()
    tokenizer = load(write_model(tmp_path_factory.mktemp("m") / "model", fast, template=None))
    assert tokenizer.max_bytes_per_token is not None
    assert len(text.encode()) <= len(document_ids(tokenizer, text)) * tokenizer.max_bytes_per_token
