"""Any conversation becomes the template's ids around those of its texts, which no text can change."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.template import render_shapes
from coordinator.text.tokenizer import Tokenizer
from longleaf.messages import Message, Role
from tests.support.chat_templates import CHATML, CONTROL, chat_tokenizer
from tests.support.service import END, encoded, write_model

ROLES: list[Role] = ["system", "user", "assistant"]
PIECES = [*CONTROL, END, "LONGLEAF000TEXT", "LONGLEAF001TEXT", "{{", "user", "\n", "\n\n", " a", "er", "é", "🐳"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6).map("".join)
MESSAGES = st.lists(st.builds(Message, st.sampled_from(ROLES), TEXTS), min_size=1, max_size=9)


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_model(Path(folder), chat_tokenizer(), CHATML), render_shapes)


@given(messages=MESSAGES, has_context=st.booleans())
@settings(max_examples=200, deadline=None)
def test_texts_stand_between_the_parts_of_the_template(messages: list[Message], has_context: bool) -> None:
    made = tokenizer()
    parts = made.shapes.make(tuple(message.role for message in messages))
    encoders = made.conversation_encoders(parts, has_context)
    pieces = [encoded(encoder, message.text) for encoder, message in zip(encoders, messages, strict=True)]
    found = [i for piece in pieces for i in piece]
    texts = [encoded(made.plain_encoder(False), message.text) for message in messages]
    before = [made.question_encoder().token_ids if has_context else parts[0], *parts[1:-1]]
    assert found == [i for one, text in zip(before, texts, strict=True) for i in (*one, *text)] + [*parts[-1]]
    control = {i for name in CONTROL if (i := chat_tokenizer().token_to_id(name)) is not None}
    assert not control.intersection(i for text in texts for i in text)
    if not has_context:
        said = "".join(f"<|im_start|>{message.role}\n{message.text}<|im_end|>\n" for message in messages)
        text = made.decode(found, keep_special=True)
        assert text.endswith(said + "<|im_start|>assistant\n")
        assert text.count("You are a helpful assistant.") == (messages[0].role != "system")
