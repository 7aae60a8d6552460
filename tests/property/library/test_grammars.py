"""Masks of grammars, against all texts of small languages."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.grammars.matcher import OPTIONS, GrammarMatcher
from longleaf.grammars.vocabulary import make_vocabulary

LETTERS = "ab"
END = 0
"""The end token, which has no text."""


def sequence(parts):
    texts = frozenset("".join(each) for each in product(*(language for _, language in parts)))
    return "".join(pattern for pattern, _ in parts), texts


def choice(parts):
    return f"({'|'.join(pattern for pattern, _ in parts)})", frozenset().union(*(language for _, language in parts))


def finite(children):
    some = st.lists(children, min_size=2, max_size=3)
    return some.map(sequence) | some.map(choice) | children.map(lambda part: (f"({part[0]})?", part[1] | {""}))


words = st.sampled_from(["a", "b", "ab", "aa"]).map(lambda word: (word, frozenset({word})))
languages = st.recursive(words, finite, max_leaves=4)
"""Patterns, each with all texts that it matches."""
tokens = st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=2, max_size=8).map(
    lambda texts: [b"", b"a", b"b", *(text.encode() for text in texts)]
)


def expected(language, listed, text):
    """The allowed tokens after a text, by enumeration."""
    prefixes = {each[:end] for each in language for end in range(len(each) + 1)}
    mask = [bool(token) and text + token.decode() in prefixes for token in listed]
    mask[END] = text in language
    return mask


def matcher_of(pattern, listed):
    found = GrammarMatcher(make_vocabulary(listed, [END]), f"start: /{pattern}/{OPTIONS}", [END])
    assert found.error == ""
    return found


@given(wanted=languages, listed=tokens, draws=st.lists(st.integers(0, 1 << 16), min_size=20, max_size=20))
@settings(max_examples=150, deadline=None)
def test_masks_are_exact_and_survive_a_rebuild(wanted, listed, draws):
    """At each step of a random answer. A matcher that replays the tokens so far has the same masks, as after a
    preemption or the loss of a rank."""
    pattern, language = wanted
    matcher, text, ids = matcher_of(pattern, listed), "", []
    for number in draws:
        mask = matcher.allowed(len(listed))
        assert mask.tolist() == expected(language, listed, text)
        rebuilt = matcher_of(pattern, listed).copy([END])
        rebuilt.replay(ids)
        assert np.array_equal(rebuilt.allowed(len(listed)), mask)
        assert rebuilt.error == ""
        allowed = np.flatnonzero(mask)
        chosen = int(allowed[number % len(allowed)])
        check_drafts(matcher, rebuilt, chosen, len(listed))
        matcher.accept(chosen)
        assert matcher.error == ""
        ids.append(chosen)
        text += listed[chosen].decode()
        is_last = not any(other != text and other.startswith(text) for other in language)
        assert matcher.has_ended == (chosen == END or is_last)
        if matcher.has_ended:
            return


def check_drafts(matcher, other, draft, size):
    """Masks behind drafts are those after the drafts. `other` is in the same state."""
    refused = int(np.flatnonzero(~matcher.allowed(size))[0]) if not matcher.allowed(size).all() else draft
    masks = matcher.allowed_behind([draft, refused, draft], size)
    other.accept(draft)
    if other.has_ended:
        assert not np.any(masks)
        return
    assert np.array_equal(masks[0], other.allowed(size))
    if other.allowed(size)[refused]:
        other.accept(refused)
        assert np.array_equal(masks[1], np.zeros(size) if other.has_ended else other.allowed(size))
    else:
        assert not np.any(masks[1:])


@pytest.mark.parametrize("size", [3, 5, 8])
def test_mask_has_the_size_of_the_logits(size):
    """An embedding may have more or fewer rows than the tokenizer has tokens."""
    listed = [b"", b"a", b"b", b"ab", b"ba"]
    mask = matcher_of("(a|b)+", listed).allowed(size)
    assert mask.tolist() == [False, True, True, True, True, False, False, False][:size]


def test_end_token_with_text_is_excluded_before_the_end():
    found = GrammarMatcher(make_vocabulary([b"a", b"b"], []), f"start: /a(b|a)b?/{OPTIONS}", [1])
    masks = []
    for token in (0, 0, 1):
        masks.append(found.allowed(2).tolist())
        found.accept(token)
    assert masks == [[True, False], [True, False], [False, True]]
    assert found.has_ended


def test_text_without_a_token_ends_with_an_error():
    found = matcher_of("ab", [b"", b"a"])
    found.allowed(2)
    found.accept(1)
    assert not found.allowed(2).any()
    assert found.error == "allows no token of the vocabulary here"


def test_tokens_that_contradict_the_grammar_are_an_error():
    found = matcher_of("aab", [b"", b"a", b"b"])
    found.replay([1, 2])
    assert found.error
    assert not found.allowed(3).any()


def test_complete_answer_may_be_replayed():
    found = matcher_of("aab", [b"", b"a", b"b"])
    found.replay([1, 1, 2])
    assert (found.allowed(3).tolist(), found.error) == ([True, False, False], "")


def test_masked_token_is_an_error():
    found = matcher_of("aab", [b"", b"a", b"b"])
    found.allowed(3)
    found.accept(2)
    assert found.error == "allows only tokens that the model excludes"


def test_forced_text_is_divided_into_the_longest_tokens():
    found = matcher_of("(a|b)abba(a|b)", [b"", b"a", b"b", b"ab", b"bba"])
    assert found.forced() == []
    found.accept(2)
    assert found.forced() == [3, 2, 1]
    assert found.allowed_behind([3, 2, 1], 5)[-1].tolist() == [False, True, True, False, False]
    for token_id in (3, 2, 1, 1):
        found.accept(token_id)
    assert found.has_ended
    assert found.forced() == []
