"""The digest that identifies a repeated request: different questions have different digests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.handlers.resumable_generations import request_digest
from longleaf.sampling import Sampling
from longleaf.types import Conversation, Generate, Message, Role

ROLES: list[Role] = ["system", "user", "assistant"]
MESSAGES = st.builds(Message, st.sampled_from(ROLES), st.text("u3\n ser", max_size=3))
CONVERSATIONS = st.builds(Conversation, st.lists(MESSAGES, max_size=4).map(tuple))
INPUTS = CONVERSATIONS | st.text("u3\n ser", max_size=5) | st.lists(st.integers(0, 3), max_size=3)


@given(one=INPUTS, other=INPUTS)
@settings(max_examples=300)
def test_different_questions_have_different_digests(one: Conversation | str, other: Conversation | str) -> None:
    requested = [request_digest(Generate(input=each, sampling=Sampling())) for each in (one, other)]
    assert (requested[0] == requested[1]) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("user", "a"), ("user", "b")], [("user", "ab")]),
        ([("user", "a"), ("user", "")], [("user", ""), ("user", "a")]),
        ([("user", "a")], [("assistant", "a")]),
        ([("user", "auser 1\nb")], [("user", "a"), ("user", "b")]),
        ([("user", "a" * 12)], [("user", "a" * 1), ("user", "a" * 2)]),
    ],
)
def test_different_messages_have_different_digests(one: list[tuple[Role, str]], other: list[tuple[Role, str]]) -> None:
    made = [Conversation(tuple(Message(*each) for each in turns)) for turns in (one, other)]
    digests = {request_digest(Generate(input=each, sampling=Sampling())) for each in made}
    digests |= {request_digest(Generate(input=each, context="book", sampling=Sampling())) for each in made}
    assert len(digests) == 4
