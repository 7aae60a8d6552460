"""Limits of extracted text in the process that receives it, which does not trust the sender."""

import msgspec
import pytest

from longleaf.documents.errors import LimitExceeded
from longleaf.documents.extraction_process import _Result
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.messages import (
    MAX_PATH,
    ExtractionEnded,
    MemberSkipped,
    MemberStarted,
    Message,
    Remark,
    TextFound,
    decode,
    encode,
)
from longleaf.documents.text_budget import TextBudget


@pytest.mark.parametrize("message", [TextFound("", ""), MemberSkipped("", ""), Remark("", "")])
def test_messages_without_text_are_counted(message: Message) -> None:
    result = _Result("a.zip", TextBudget(ExtractionLimits(num_sections=3)))
    for _ in range(3):
        result.add(message)
    with pytest.raises(LimitExceeded, match="has more than 3 sections"):
        result.add(message)


def test_names_count_as_text() -> None:
    result = _Result("a", TextBudget(ExtractionLimits(text_bytes=100)))
    result.add(MemberStarted("b" * 30))
    for _ in range(3):
        result.add(TextFound("", ""))
    with pytest.raises(LimitExceeded, match="has more than 100 bytes of text and names"):
        result.add(TextFound("", ""))


def test_sections_of_a_member_share_its_path() -> None:
    result = _Result("a", TextBudget())
    result.add(MemberStarted("b"))
    for label in ("cell 1", "cell 2"):
        result.add(TextFound(label, "x"))
    first, second = result.extracted().sections
    assert first.file is second.file


def test_discarded_file_frees_its_share() -> None:
    budget = TextBudget(ExtractionLimits(num_sections=2, text_bytes=10))
    for _ in range(5):
        result = _Result("a", budget)
        result.add(TextFound("", "12345678"))
        result.discard()
    retained = _Result("a", budget)
    retained.add(TextFound("", "1234567"))
    with pytest.raises(LimitExceeded):
        retained.add(TextFound("", "12"))


@pytest.mark.parametrize(
    "message",
    [
        MemberStarted("p" * (MAX_PATH + 1)),
        MemberSkipped("p" * (MAX_PATH + 1), ""),
        MemberSkipped("", "r" * 501),
        Remark("", "r" * 501),
        ExtractionEnded("r" * 501),
        TextFound("l" * 101, ""),
    ],
)
def test_long_names_and_reasons_are_refused(message: Message) -> None:
    with pytest.raises(msgspec.ValidationError, match="length <="):
        decode(encode(message))
