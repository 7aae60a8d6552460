"""Quotas: the refused requests, the quota that is named, and whether a retry can succeed."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.auth.caller import CALLER, Caller
from coordinator.auth.leaky_bucket import LeakyBucket
from coordinator.auth.quotas import QuotaEnforcer
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.engine_messages import Tokens
from longleaf.credentials import Quotas
from longleaf.errors import ResourceExhausted
from longleaf.sampling import Token
from tests.unit.auth.test_credentials import Clock

USAGE = TenantUsage(contexts=3, tokens=100, running=2, waiting=1, uploads=1)


def make_enforcer(clock: Clock | None = None, usage: TenantUsage = USAGE, **quotas: int) -> QuotaEnforcer:
    CALLER.set(Caller(tenant="acme", quotas=Quotas(**quotas)))
    return QuotaEnforcer(
        lambda tenant: usage if tenant == "acme" else TenantUsage(), clock or Clock(), lambda _: 2, lambda _: 1000
    )


def begins_generation(num_tokens: int) -> Callable[[QuotaEnforcer], None]:
    """Returns a function that begins and ends a generation."""

    def begin(it: QuotaEnforcer) -> None:
        with it.begin_generation(num_tokens):
            pass

    return begin


def begins_document(num_contexts: int, num_tokens: int) -> Callable[[QuotaEnforcer], None]:
    """Returns a function that begins and ends a document."""

    def begin(it: QuotaEnforcer) -> None:
        with it.begin_document(num_contexts, num_tokens):
            pass

    return begin


@pytest.mark.parametrize(
    ("quotas", "begin", "name", "helps"),
    [
        ({"contexts": 3}, lambda it: it.check_context(1, 0), "contexts", False),
        ({"tokens": 109}, lambda it: it.check_context(0, 10), "tokens", False),
        ({"storage_bytes": 1000}, lambda it: it.check_context(0, 1), "storage_bytes", False),
        ({"contexts": 3}, begins_document(1, 1), "contexts", False),
        ({"uploads": 2}, lambda it: it.check_upload(), "uploads", True),
        ({"generations": 0}, begins_generation(1), "generations", False),
        ({"generations": 2, "waiting": 1}, begins_generation(1), "waiting", True),
        ({"generations": 3, "waiting": 0}, begins_generation(1), "generations", True),
        ({"tokens_in_per_minute": 0}, begins_generation(1), "tokens_in_per_minute", False),
        ({"tokens_in_per_minute": 0}, lambda it: it.check_rate_in(), "tokens_in_per_minute", False),
        ({"tokens_out_per_minute": 0}, begins_generation(1), "tokens_out_per_minute", False),
    ],
)
def test_each_quota_is_named(
    quotas: dict[str, int], begin: Callable[[QuotaEnforcer], None], name: str, helps: bool
) -> None:
    with pytest.raises(ResourceExhausted) as refused:
        begin(make_enforcer(**quotas))
    assert refused.value.subject == f"quotas/{name}"
    assert (refused.value.retry_seconds is not None) == helps
    assert "acme" in str(refused.value)


@pytest.mark.parametrize(
    ("quotas", "begin"),
    [
        ({"contexts": 4}, lambda it: it.check_context(1, 0)),
        ({"contexts": 3}, lambda it: it.check_context(0, 1 << 40)),
        ({"tokens": 110}, lambda it: it.check_context(1, 10)),
        ({"storage_bytes": 1001}, lambda it: it.check_context(1, 10)),
        ({"uploads": 3}, lambda it: it.check_upload()),
        ({"generations": 1}, begins_generation(1)),  # it waits, for as many as all may
        ({"generations": 2, "waiting": 2}, begins_generation(1)),
        ({"tokens_in_per_minute": 1}, begins_generation(1 << 40)),
        ({}, begins_generation(1 << 40)),
        ({}, begins_document(1 << 40, 1 << 40)),
        ({}, lambda it: (it.check_rate_in(), it.check_upload())),
    ],
)
def test_requests_within_quotas_pass(quotas: dict[str, int], begin: Callable[[QuotaEnforcer], None]) -> None:
    begin(make_enforcer(**quotas))


def test_contexts_being_created_count() -> None:
    it = make_enforcer(contexts=5, tokens=120)
    with it.making(1, 10):
        it.check_context(1, 10)
        for num_contexts, num_tokens, name in ((2, 0, "contexts"), (1, 11, "tokens")):
            with pytest.raises(ResourceExhausted, match=f"quotas/{name}"), it.making(1, num_tokens):
                it.check_context(num_contexts, 0)
    it.check_context(2, 20)


def test_long_prompt_delays_later_requests() -> None:
    clock = Clock()
    it = make_enforcer(clock, tokens_in_per_minute=600)
    begins_generation(1200)(it)
    with pytest.raises(ResourceExhausted) as refused:
        begins_generation(1)(it)
    assert refused.value.retry_seconds == pytest.approx(60.0)
    clock.now += 60.0
    it.check_rate_in()


def test_running_requests_count() -> None:
    it = make_enforcer(contexts=5, tokens=130)
    with it.making(1, 20):
        it.check_context(1, 10)
        for wanted in ((2, 0), (0, 11)):
            with pytest.raises(ResourceExhausted):
                it.check_context(*wanted)
        with it.making(1, 10), pytest.raises(ResourceExhausted, match="quotas/contexts"):
            it.check_context(1, 0)
        CALLER.set(Caller(tenant="bolt", quotas=Quotas(contexts=1)))
        it.check_context(1, 0)
    make_enforcer(contexts=5, tokens=130)
    it.check_context(2, 30)


@pytest.mark.parametrize("begins", [lambda it: it.begin_generation(1000), lambda it: it.begin_document(1, 1000)])
def test_refused_requests_are_not_charged(begins: Callable[[QuotaEnforcer], AbstractContextManager[None]]) -> None:
    it = make_enforcer(tokens_in_per_minute=10)
    for _ in range(3):
        with pytest.raises(ResourceExhausted, match="queue"), begins(it):
            raise ResourceExhausted("queue", "others wait already", 1.0)
    it.check_rate_in()
    with begins(it):
        pass
    with pytest.raises(ResourceExhausted, match="quotas/tokens_in_per_minute"):
        it.check_rate_in()


def test_output_tokens_count() -> None:
    clock = Clock()
    it = make_enforcer(clock, tokens_out_per_minute=10)
    begins_generation(5)(it)
    with it.generation("acme/x", "acme") as emit:
        for index in range(15):
            emit(Tokens(index, (Token(65),)))
    with pytest.raises(ResourceExhausted, match="quotas/tokens_out_per_minute"):
        begins_generation(5)(it)
    CALLER.set(Caller(tenant="bolt", quotas=Quotas(tokens_out_per_minute=10)))
    begins_generation(5)(it)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100)), max_size=30), st.integers(1, 10**6))
def test_bucket_exceeds_its_rate_by_at_most_one_amount(takes: list[tuple[int, float]], rate: int) -> None:
    """A client that waits for a free bucket gets at most a minute's worth more than the rate, plus the last amount."""
    clock = Clock()
    bucket, taken, last = LeakyBucket(clock), 0, 0
    for amount, seconds in takes:
        clock.now += seconds
        if bucket.seconds_until_free(rate) == 0.0:
            assert taken - last <= rate * clock.now / 60.0 + rate + 1e-6 * (1 + taken)
            bucket.take(amount, rate)
            taken, last = taken + amount, amount


@given(st.integers(1, 10**6), st.integers(0, 10**8))
def test_bucket_is_free_after_the_reported_delay(rate: int, amount: int) -> None:
    clock = Clock()
    bucket = LeakyBucket(clock)
    bucket.take(amount, rate)
    clock.now += bucket.seconds_until_free(rate) * (1 + 1e-9) + 1e-6
    assert bucket.seconds_until_free(rate) == 0.0
