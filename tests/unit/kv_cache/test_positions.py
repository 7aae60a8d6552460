"""The position limit, and the rope for a capacity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.kv_cache.positions import UNLIMITED, Positions
from longleaf.errors import InvalidArgument
from longleaf.positions import FLOAT32_POSITIONS, OWN_ROPE, Rope, Rotary

ERRORS = {"float32_error": 6e-8, "float64_error": 9e-16}
PLAIN = Rotary(kind="default", trained=1 << 24, **ERRORS)
LONGROPE = Rotary(kind="longrope", trained=FLOAT32_POSITIONS, scaled_from=4096, **ERRORS)
DYNAMIC = Rotary(kind="dynamic", trained=4096, scaled_from=4096, is_graded=True, **ERRORS)


def test_precision_changes_at_the_limit_of_float32() -> None:
    positions = Positions(PLAIN, 0)
    assert positions.rope(FLOAT32_POSITIONS) == OWN_ROPE
    assert positions.rope(FLOAT32_POSITIONS + 1) == Rope(is_double=True)


def test_scaling_changes_where_the_model_changes_it() -> None:
    assert Positions(LONGROPE, 0).rope(4096) == OWN_ROPE
    assert Positions(LONGROPE, 0).rope(4097) == Positions(LONGROPE, 0).rope(FLOAT32_POSITIONS) == Rope(scaled_for=4097)
    assert Positions(DYNAMIC, 0, allow_long=True).rope(5000) == Rope(scaled_for=5000)
    assert Positions(DYNAMIC, 0, allow_long=True).rope(200_000) == Rope(scaled_for=200_000, is_double=True)


def test_generation_uses_the_rope_for_its_current_length() -> None:
    assert Positions(LONGROPE, 0).ropes(4096) == (OWN_ROPE, OWN_ROPE, UNLIMITED)
    ropes = Positions(LONGROPE, 0, allow_long=True).ropes(200_000)
    assert (ropes.at(4096), ropes.at(4097)) == (Rope(is_double=True), Rope(scaled_for=4097, is_double=True))
    ropes = Positions(DYNAMIC, 0, allow_long=True).ropes(5000)
    assert ropes.at(1) == ropes.at(5000) == Rope(scaled_for=5000)


@pytest.mark.parametrize(
    ("rotary", "num_tokens", "capacity"),
    [
        (PLAIN, 1000, FLOAT32_POSITIONS),
        (PLAIN, FLOAT32_POSITIONS * 7 // 8, FLOAT32_POSITIONS),
        (PLAIN, FLOAT32_POSITIONS * 7 // 8 + 1, 1 << 24),
        (LONGROPE, 3584, 4096),
        (LONGROPE, 3585, FLOAT32_POSITIONS),
        (LONGROPE, FLOAT32_POSITIONS, FLOAT32_POSITIONS),
    ],
)
def test_default_capacity_does_not_affect_the_document(rotary: Rotary, num_tokens: int, capacity: int) -> None:
    assert Positions(rotary, 0).capacity(num_tokens, None) == capacity


@given(st.sampled_from([PLAIN, LONGROPE, DYNAMIC]), st.integers(1, 1 << 26), st.booleans())
def test_capacity_covers_the_document_within_the_limit(rotary: Rotary, num_tokens: int, allow_long: bool) -> None:
    positions = Positions(rotary, 0, allow_long=allow_long)
    capacity = positions.capacity(num_tokens, None)
    assert capacity <= positions.limit
    assert capacity >= min(num_tokens, positions.limit)
    if rotary.is_graded and capacity < positions.limit:
        assert capacity <= max(rotary.scaled_from, 4 * num_tokens), "a scaling for more positions than needed"


@pytest.mark.parametrize(
    ("declared", "words"), [(9, "less than the 10 tokens"), (4097, "4,097 exceeds 4,096 positions.*--allow-long")]
)
def test_declared_capacity_must_fit(declared: int, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        Positions(DYNAMIC, 0).capacity(10, declared)
    assert caught.value.field == "config.capacity_token_count"
    assert Positions(DYNAMIC, 0, allow_long=True).capacity(10, 5000) == 5000


def test_limit_is_the_trained_length_unless_more_is_allowed() -> None:
    assert Positions(DYNAMIC, 99).limit == 4096
    assert Positions(Rotary(), 99).limit == 99
    assert Positions(DYNAMIC, 99, allow_long=True).limit == UNLIMITED


def test_allow_long_does_not_exceed_hard_limits() -> None:
    learned = Rotary(trained=1024, max_positions=1024, reason="it has no rotary positions")
    positions = Positions(learned, 0, allow_long=True)
    assert positions.limit == 1024
    assert positions.limit_name == "because it has no rotary positions"
    assert positions.rope(1024) == OWN_ROPE


def test_describe_reports_capacity_rope_and_precision() -> None:
    positions = Positions(PLAIN, 0, allow_long=True)
    info = positions.describe(Rope(is_double=True), 1 << 25, (1 << 24) + 1)
    assert (info.capacity, info.rope, info.precision, info.is_beyond_trained) == (1 << 25, "default", "float64", True)
    assert 0 < info.phase_error < 1e-7
    near = positions.describe(OWN_ROPE, FLOAT32_POSITIONS, 1000)
    assert (near.precision, near.is_beyond_trained) == ("float32", False)
    assert near.phase_error == pytest.approx(6e-5)
