"""Conversations as ids, made as the service makes them."""

from collections.abc import Sequence
from itertools import chain

from coordinator.text.control_tokens import TemplatePiece
from coordinator.text.tokenizer import Tokenizer
from longleaf.types import Message, Role
from tests.support.service import encoded


def conversation_ids(tokenizer: Tokenizer, turns: Sequence[tuple[Role, str]]) -> list[int]:
    """Those of a prompt."""
    assert tokenizer.chat_template is not None
    return piece_ids(tokenizer, tokenizer.chat_template.conversation([Message(*turn) for turn in turns], {}))


def question_ids(tokenizer: Tokenizer, turns: Sequence[tuple[Role, str]]) -> list[int]:
    """The ids that follow a document."""
    if tokenizer.chat_template is None:
        pieces = tokenizer.plain_question(turns[0][1])
    else:
        pieces = tokenizer.chat_template.question([Message(*turn) for turn in turns], {})
    return piece_ids(tokenizer, pieces, is_continued=True)


def piece_ids(tokenizer: Tokenizer, pieces: Sequence[TemplatePiece], is_continued: bool = False) -> list[int]:
    found = tokenizer.encoders(pieces, is_continued=is_continued)
    return list(chain.from_iterable(encoded(encoder, text) for encoder, text in found))
