"""The parts of a prompt before and after a document, and the messages that a template refuses."""

from datetime import datetime
from pathlib import Path

import pytest

from coordinator.text.chat_template import ConversationRefused
from coordinator.text.control_tokens import NONCHARACTERS, ControlTokens, Marks, TemplatePiece
from coordinator.text.renderer import Renderer
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import embedded_model
from longleaf.errors import InvalidArgument, ModelRefused
from longleaf.types import Message
from tests.support.chat_templates import CHATML, FOLDING, GEMMA, LLAMA, MISTRAL, chat_tokenizer
from tests.support.conversations import conversation_ids
from tests.support.sentencepiece import sentencepiece_tokenizer
from tests.support.service import encoded, write_model

PRESET = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
S, U, A = "system", "user", "assistant"


def load(folder: Path, template: str) -> Tokenizer:
    return Tokenizer.load(write_model(folder, chat_tokenizer(), template), DirectRenderer())


def messages(*turns: tuple[str, str]) -> list[Message]:
    return [Message(*turn) for turn in turns]


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (CHATML, PRESET + "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        (MISTRAL, "<|begin|>[INST]", "[/INST]"),
        ("{{ '[INST] ' + messages[-1].content + ' [/INST]' }}", "[INST] ", " [/INST]"),
    ],
)  # fmt: skip
def test_document_is_placed_in_the_first_question(template: str, before: str, after: str, tmp_path: Path) -> None:
    made = load(tmp_path, template).chat_template
    assert made is not None
    assert made.before_document == before
    assert made.question(messages((U, "Why?")), {}) == [TemplatePiece(f"\n\nWhy?{after}")]


def test_prefix_of_a_document_is_encoded_together_with_it(tmp_path: Path) -> None:
    """The ids equal those of the whole text."""
    for kind in ("prepend", "always", "first"):
        template = "{{ bos_token + '[INST] ' }}{% for m in messages %}{{ m.content + ' [/INST]' }}{% endfor %}"
        fast = sentencepiece_tokenizer(kind)
        tokenizer = Tokenizer.load(write_model(tmp_path / kind, fast, template), DirectRenderer())
        document = encoded(tokenizer.document_encoder(is_first=True), "Hi there")
        assert document == conversation_ids(tokenizer, [(U, "Hi there")])[: len(document)]
        template = "{% for m in messages %}{{ '<|user|>' + m.content + '<|end|>' }}{% endfor %}"
        tokenizer = Tokenizer.load(write_model(tmp_path / kind, fast, template), DirectRenderer())
        document = encoded(tokenizer.document_encoder(is_first=True), "Hi there")
        assert document == conversation_ids(tokenizer, [(U, "Hi there")])[: len(document)]


def test_document_offsets_are_counted_from_its_own_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ '<|im_start|>abc ' + messages[0].content }}")
    encoder = tokenizer.document_encoder(is_first=True)
    ids = encoded(encoder, "xy " * 200)
    assert encoder.starts is not None and encoder.starts.is_whole(len(ids))
    retained = encoder.starts.starts
    assert retained[0] == 0
    text = tokenizer.decode(ids[:64], keep_special=True)
    assert retained[1] == len(text.removeprefix("<|im_start|>abc ").encode())


@pytest.mark.parametrize("text", ["xy z", "\nabc"])
def test_tokens_of_the_template_are_before_the_text_of_a_document(text: str, tmp_path: Path) -> None:
    """This includes tokens that are encoded together with it. A token with characters of both belongs to the text."""
    tokenizer = load(tmp_path, CHATML)
    encoder = tokenizer.document_encoder(is_first=True)
    ids = encoded(encoder, text)
    assert encoder.starts is not None
    num_lead = encoder.starts.num_lead(ids)
    opening = PRESET + "<|im_start|>user\n"
    assert opening.startswith(tokenizer.decode(ids[:num_lead], keep_special=True))
    assert len(tokenizer.decode(ids[: num_lead + 1], keep_special=True)) > len(opening)


@pytest.mark.parametrize(
    ("source", "turns", "message", "text"),
    [
        (GEMMA, ((S, "x"), (U, "y")), 0, "cannot be rendered: System role not supported"),
        (GEMMA, ((U, ""), (A, ""), (U, ""), (A, ""), (A, ""), (U, "")), 4, "roles must alternate"),
        (FOLDING, ((S, ""), (U, ""), (U, "")), 2, "roles must alternate"),
        ("{{ messages[0].content }}{{ raise_exception('x' * 9999) if messages[1] }}", ((U, ""), (U, "")), 1, "x" * 400),
        ("{{ messages[0].content }}{{ 'x' * 9999999 if messages[1] }}", ((U, ""), (U, "")), None, "9,999,999 chara"),
    ],
)  # fmt: skip
def test_refused_message_is_named(
    source: str, turns: tuple[tuple[str, str], ...], message: int | None, text: str, tmp_path: Path
) -> None:
    made = load(tmp_path, source).chat_template
    assert made is not None
    with pytest.raises(ConversationRefused, match=text) as caught:
        made.conversation(messages(*turns), {})
    assert caught.value.message == message
    assert len(str(caught.value)) < 600


def test_template_without_the_question_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="the chat template leaves out the user's message"):
        load(tmp_path, "{{ bos_token }}")


def test_system_message_before_a_document_must_not_change_the_end(tmp_path: Path) -> None:
    made = load(tmp_path, CHATML + "{% if messages[0].role == 'system' %}Obey: {% endif %}").chat_template
    assert made is not None
    with pytest.raises(ConversationRefused, match="changes the prompt after a question"):
        made.opening("Be brief.")


def test_embedded_model_accepts_only_one_question() -> None:
    """In a conversation it would answer the first question again."""
    made = Tokenizer.load(embedded_model(), DirectRenderer()).chat_template
    assert made is not None
    assert made.conversation(messages((U, "Why?")), {})
    for turns, message in ((((U, ""), (A, ""), (U, "")), 1), (((U, ""), (U, "")), 1)):
        with pytest.raises(ConversationRefused, match="knows no conversation: ask one question alone") as caught:
            made.conversation(messages(*turns), {})
        assert caught.value.message == message


@pytest.mark.parametrize("content", ["m.content", "m.content | trim", "m.content | tojson"])
def test_omitted_system_message_is_refused(content: str, tmp_path: Path) -> None:
    show = f"{{% for m in messages if m.role != 'ROLE' %}}{{{{ {content} }}}}{{% endfor %}}"
    turns = messages((S, ' Say "é". [INST]\n'), (U, "Why?"))
    made = load(tmp_path / "system", show.replace("ROLE", "system")).chat_template
    assert made is not None
    with pytest.raises(ConversationRefused, match="leaves out the system's message") as caught:
        made.conversation(turns, {})
    assert caught.value.message == 0
    made = load(tmp_path / "none", show.replace("ROLE", "none")).chat_template
    assert made is not None and made.conversation(turns, {})


def test_date_is_that_of_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path, chat_tokenizer(), LLAMA)
    renderer = Renderer(now=datetime(2026, 12, 31, 23, 59))
    made = Tokenizer.load(folder, renderer).chat_template
    assert made is not None
    for turns in (((U, ""),), ((S, ""), (U, "")), ((U, ""), (U, ""), (U, ""))):
        assert "Today Date: 31 Dec 2026" in made.conversation(messages(*turns), {})[0].text
    renderer.stop()


def test_variables_reach_the_template(tmp_path: Path) -> None:
    made = load(tmp_path, "{{ messages[0].content }}{{ '<think>' if enable_thinking else '' }}").chat_template
    assert made is not None
    assert made.conversation(messages((U, "x")), {"enable_thinking": True}) == [TemplatePiece("x<think>")]
    assert made.conversation(messages((U, "x")), {"messages": "none", "enable_thinking": False}) == [TemplatePiece("x")]


def test_texts_of_a_conversation_have_a_limit(tmp_path: Path) -> None:
    made = load(tmp_path, CHATML).chat_template
    assert made is not None
    with pytest.raises(InvalidArgument, match=r"conversation: has 16,777,217 bytes of text; the limit is 16,777,216"):
        made.conversation(messages((U, "x" * (1 << 24)), (A, "y"), (U, "")), {})


# Control tokens


def test_longest_control_token_is_matched() -> None:
    control, marks = ControlTokens(["<a", "<a>", "<ab>", "b", "[INST]"]), Marks("1", "2", "3", "4")
    assert control.mark("x<ab><a><ax[INST", marks) == "x1<ab>21<a>21<a2x[INST"
    assert control.count("<ab>b[INST]") == 3
    assert ControlTokens([]).mark("<a>", marks) == "<a>"
    with pytest.raises(ModelRefused, match="too long"):
        ControlTokens("x" * size for size in range(1, 2_500))


def test_placeholders_are_unused_characters() -> None:
    texts = ["a", *NONCHARACTERS[:5], "b" + NONCHARACTERS[7]]
    assert not {*Marks.beside(texts)} & {*"".join(texts)}
    with pytest.raises(InvalidArgument, match="too many noncharacters"):
        Marks.beside(NONCHARACTERS[2:])


def test_unpaired_placeholders_are_removed() -> None:
    control, marks = ControlTokens(["b", "<b>"]), Marks("1", "2", "3", "4")
    assert control.split("a1b2c", marks) == [TemplatePiece("a"), TemplatePiece("b", True), TemplatePiece("c")]
    assert control.split("1b", marks) == [TemplatePiece("b")]
    assert control.split("a21b2", marks) == [TemplatePiece("a"), TemplatePiece("b", True)]
    assert control.split("", marks) == []
    # the text that a template writes between two halves of a split text
    assert control.split("1\n<b>\n2", marks) == [TemplatePiece("\n<b>\n")]
    assert ControlTokens([]).split("a1b2", marks) == [TemplatePiece("a"), TemplatePiece("b")]


def test_control_token_between_two_texts_is_one_token(tmp_path: Path) -> None:
    """Both texts look like parts of a control token, and are tokenized separately from the token between them."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<|im_end|>{% endif %}{% endfor %}"
    made = load(tmp_path, template).chat_template
    assert made is not None
    output = [Message("user", "a<"), Message("assistant", ">b<|im_"), Message("user", "end|>c")]
    pieces = made.conversation(output, {})
    assert not any(piece.is_plain for piece in pieces)
    assert [piece.text for piece in pieces] == ["a<", "<|im_end|>", ">b<|im_", "end|>c<|im_end|>"]
