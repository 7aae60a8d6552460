"""Answers with grammars: their rows, their end, and errors of the grammar."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from coordinator.engine_messages import Ended
from longleaf.errors import InvalidArgument
from longleaf.rank_protocol.step import Decode, GrammarTerms, StepPlan, StepResult
from tests.support.random_drafter import RandomPolicy
from tests.support.scheduling import Bench

GRAMMAR = "start: /a+/"
END = 511


def commit(bench: Bench, plan: StepPlan, **changes: object) -> None:
    bench.commit(plan, replace(bench._result(plan), **changes))


def begun(max_tokens: int = 6, **options: object) -> tuple[Bench, int]:
    bench = Bench(max_draft_tokens=7)
    return bench, bench.ask(5, max_tokens, ends=(END,), grammar=GRAMMAR, max_draft_tokens=7, tenant="t", **options)


def terms_of(plan: StepPlan) -> GrammarTerms | None:
    assert isinstance(plan.work, Decode)
    terms = plan.work.rows[0].terms
    return terms.grammar if terms is not None else None


def last(bench: Bench, job: int) -> object:
    return bench.seen[job][-1]


def test_first_row_has_the_grammar() -> None:
    bench, job = begun(max_tokens=12)
    plans = list[StepPlan]()
    while (plan := bench.schedule()) is not None:
        plans.append(plan)
        bench.commit(plan)
    assert terms_of(plans[0]) == GrammarTerms(GRAMMAR, (END,), "t")
    assert len(bench.tokens(job)) == 12


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(3, 6), (6, 6)])
def test_complete_answer_ends_with_stop(num_tokens: int, max_tokens: int) -> None:
    """At its maximum length as well, and the row that is planned ahead is dropped."""
    bench, job = begun(max_tokens)
    plan = bench.schedule()
    for index in range(num_tokens):
        assert plan is not None
        ahead = bench.schedule()
        commit(bench, plan, completed=(job,) if index == num_tokens - 1 else ())
        plan = ahead
    if plan is not None:
        bench.commit(plan)
    ended = last(bench, job)
    assert isinstance(ended, Ended)
    assert (ended.reason, len(bench.tokens(job))) == ("stop", num_tokens)


def test_end_token_is_the_reason_even_if_the_answer_is_complete() -> None:
    bench = Bench()
    job = bench.ask(5, 6, ends=tuple(range(1 << 16)), grammar=GRAMMAR)
    plan = bench.schedule()
    assert plan is not None
    commit(bench, plan, completed=(job,))
    ended = last(bench, job)
    assert isinstance(ended, Ended)
    assert ended.reason == "end_token"


def test_answer_that_its_grammar_cannot_continue_ends_with_an_error() -> None:
    bench, job = begun()
    plan = bench.schedule()
    assert plan is not None
    bench.commit(plan)
    plan = bench.schedule()
    assert plan is not None
    result: StepResult = bench._result(plan)
    bench.commit(plan, replace(result, tokens={}, unmatched={job: "is too complex"}))
    error = last(bench, job)
    assert isinstance(error, InvalidArgument) or isinstance(getattr(error, "error", None), InvalidArgument)
    assert "constraint: token 1 of the answer: is too complex" in str(getattr(error, "error", error))
    bench.run()


def test_preempted_answer_sends_its_tokens_again() -> None:
    """Rank 0 rebuilds the state of the grammar from them."""
    bench, job = begun(max_tokens=8)
    for _ in range(3):
        plan = bench.schedule()
        assert plan is not None
        bench.commit(plan)
    running = bench.scheduler._running[job]
    bench.scheduler._lifecycle.preempt(running)  # type: ignore[arg-type]
    plan = bench.schedule()
    while plan is not None and not (isinstance(plan.work, Decode) and plan.work.rows[0].terms):
        bench.commit(plan)
        plan = bench.schedule()
    assert plan is not None
    terms = terms_of(plan)
    assert terms is not None
    assert terms.generated == tuple(bench.tokens(job))
    assert len(terms.generated) == 3
    bench.commit(plan)
    bench.run()
    assert len(bench.tokens(job)) == 8


class EveryDraft(RandomPolicy):
    """Uses whole drafts, and waits for them."""

    def is_worth_waiting(self, expected: Sequence[Sequence[float]]) -> bool:
        return True

    def lengths(self, offered: Sequence[Sequence[float]]) -> list[int]:
        return [len(chances) for chances in offered]


def test_forced_text_is_the_next_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the block has room for, after the tokens of the step that reported it, and there only."""
    bench, job = begun(max_tokens=12)
    monkeypatch.setattr(bench.scheduler._drafter, "_policy", EveryDraft(random.Random(0)))
    forced, drafts = (), list[tuple[int, ...]]()
    while (plan := bench.schedule()) is not None:
        assert isinstance(plan.work, Decode)
        [row] = plan.work.rows
        assert row.draft_ids == forced[: len(row.draft_ids)]
        drafts.append(row.draft_ids)
        forced = () if forced else (7, 8, 9)
        commit(bench, plan, forced={job: forced} if forced else {})
    assert {(), (7, 8)} <= {*drafts}
