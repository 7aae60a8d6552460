"""Generations that a service resumes from the journal of its predecessor: the events and the retention times."""

import asyncio
import resource
import shutil
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from coordinator.engine_messages import DocumentPrompt
from coordinator.grammars.compiler import GrammarCompiler
from coordinator.persistence.journal.journal import Journal
from coordinator.text.tokenizer import Tokenizer
from longleaf.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    RankLost,
    ResourceExhausted,
    StorageUnavailable,
    Unavailable,
)
from longleaf.rank_protocol.step import Decode, Row, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from longleaf.types import Constraint, Conversation, Delta, Event, Message, Resume, Started, regex
from tests.support.fakes.ranks import FakeRanks
from tests.support.service import ids
from tests.support.successors import CONFIG, VOCAB, Served, asked, num_tokens, serving, whole
from tests.support.timers import Timers

pytestmark = pytest.mark.timeout(60)

SAMPLING = SamplingParams(max_tokens=30)


def copy_of(folder: Path) -> Path:
    """A copy of the folder in the state that a killed process would leave."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy)
    return copy


async def begin(folder: Path, tokenizer: Tokenizer, count: int = 5, num_samples: int = 1) -> list[Event]:
    """The events that a client received before the first service ended."""
    async with serving(folder, tokenizer) as service:
        return await service.read(asked(SAMPLING, num_samples), count)


class NamedGrammars(GrammarCompiler):
    """Names grammars instead of compiling them."""

    async def compile(self, tenant: str, constraint: Constraint) -> str:
        return f"{constraint.kind} {constraint.text}"


async def test_resumed_generation_continues_its_constraint(folder: Path, tokenizer: Tokenizer) -> None:
    """With the tokens of the answer, from which the ranks rebuild the state of the grammar."""
    request = msgspec.structs.replace(asked(SAMPLING), constraint=regex("a+"))
    grammars = NamedGrammars(folder)
    async with serving(folder, tokenizer, grammars=grammars) as service:
        seen = await service.read(request, 8)
    async with serving(folder, tokenizer, grammars=grammars) as service:
        events = await service.read(Resume("one", num_tokens(seen)))
        rows = [row for plan in service.ranks.plans if isinstance(plan.work, Decode) for row in plan.work.rows]
    assert num_tokens(seen) > 0
    assert num_tokens(seen) + num_tokens(events) == SAMPLING.max_tokens
    [terms] = [row.terms.grammar for row in rows if row.terms is not None]
    assert terms is not None
    assert (terms.grammar, len(terms.generated) >= num_tokens(seen)) == ("regex a+", True)
    assert terms.end_tokens == tuple(sorted(tokenizer.end_tokens))


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_repeated_request_resumes_its_generation(folder: Path, tokenizer: Tokenizer) -> None:
    seen = await begin(folder, tokenizer)
    assert num_tokens(seen) > 0
    async with serving(folder, tokenizer) as service:
        again = await service.read(asked(SAMPLING))
        assert isinstance(again[0], Started)
        reported = deltas(seen)
        assert deltas(again)[: len(reported)] == reported
        with pytest.raises(InvalidArgument, match="another request"):
            await service.read(asked(SAMPLING, text="something else"))


async def test_conversation_continues_without_being_written_to_disk(folder: Path, tokenizer: Tokenizer) -> None:
    output = (
        Message("system", "dq7 be brief"),
        Message("user", "dq7 who?"),
        Message("assistant", ""),
        Message("user", "y"),
    )
    request = msgspec.structs.replace(asked(SAMPLING), input=Conversation(output), use_chat_template=None)
    async with serving(folder, tokenizer) as service:
        expected = whole(await service.read(msgspec.structs.replace(request, request_id="two", resume_seconds=0.0)))
        seen = await service.read(request, 5)
        assert seen[0] == (await service.read(request, 1))[0], "the same conversation is the same request"
    assert num_tokens(seen) > 0
    assert not any(b"dq7" in path.read_bytes() for path in files(folder))
    async with serving(folder, tokenizer) as service:
        again = await service.read(Resume("one", num_tokens(seen)))
        assert whole([*seen, *deltas(again), again[-1]]) == expected
        assert deltas(await service.read(request))[0].index == 0
        for other in (
            output[1:],
            (*output[:2], Message("assistant", "y"), Message("user", "y")),
            (output[0], output[3]),
        ):
            with pytest.raises(InvalidArgument, match="another request"):
                await service.read(msgspec.structs.replace(request, input=Conversation(other)))


def deltas(events: list[Event]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


async def test_generation_is_idle_until_a_client_connects(folder: Path, tokenizer: Tokenizer) -> None:
    await begin(folder, tokenizer)
    async with serving(folder, tokenizer) as service:
        assert service.engine.cluster().running == service.engine.cluster().waiting == 0
        await service.read(Resume("one", 0))
        assert service.ranks.plans


async def test_finished_generation_is_only_replayed(folder: Path, tokenizer: Tokenizer) -> None:
    seen = await begin(folder, tokenizer, 10**6, num_samples=2)
    async with serving(folder, tokenizer) as service:
        again = await service.read(Resume("one", 0))
        assert not service.ranks.plans
        for sample in range(2):
            assert whole(again, sample) == whole(seen, sample)


async def test_retention_time_restarts_with_the_service(folder: Path, tokenizer: Tokenizer) -> None:
    await begin(folder, tokenizer)
    timers = Timers()
    async with serving(folder, tokenizer, later=timers) as service:
        timers.advance(59.0)
        await service.read(Resume("one", 0), 2)
        timers.advance(59.0)
        assert files(folder)
        timers.advance(1.0)
        assert not files(folder)
        with pytest.raises(NotFound, match="generations/one"):
            await service.read(Resume("one", 0))
    assert not list(Journal(folder).load())


async def test_cancelled_generation_is_removed_from_the_journal(folder: Path, tokenizer: Tokenizer) -> None:
    await begin(folder, tokenizer)
    async with serving(folder, tokenizer) as service:
        await service.generation.cancel("one")
        assert not files(folder)


async def test_deadline_that_passed_during_a_restart_ends_the_generation(folder: Path, tokenizer: Tokenizer) -> None:
    """The time limit is 5 seconds plus the time for which a generation is retained without a reader."""
    async with (
        serving(folder, tokenizer, wall_clock=lambda: 1000.0) as service,
        aclosing(service.generation.run(asked(SAMPLING), seconds=5.0)) as events,
    ):
        await anext(events)
    copy = copy_of(folder)
    async with serving(copy, tokenizer, wall_clock=lambda: 1064.0) as service:
        assert len(whole(await service.read(Resume("one", 0)))[0]) == 30
    async with serving(folder, tokenizer, wall_clock=lambda: 1066.0) as service:
        with pytest.raises(DeadlineExceeded):
            await service.read(Resume("one", 0))
        assert not files(folder)


async def test_resume_without_its_context_gets_not_found(folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(folder, tokenizer) as service:
        await ingest(service)
        await service.read(asked(SAMPLING, context="doc"), 5)
    async with serving(folder, tokenizer) as service:
        with pytest.raises(NotFound, match="contexts/doc"):
            await service.read(Resume("one", 0))
        assert not files(folder)


async def ingest(service: Served) -> None:
    _ = [event async for event in service.engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(50))))]


async def test_generation_over_a_context_is_resumed(folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(folder, tokenizer) as service:
        await ingest(service)
        wanted = await service.read(msgspec.structs.replace(asked(SAMPLING, 2, "doc"), request_id="other"))
        seen = await service.read(asked(SAMPLING, 2, "doc"), 5)
    async with serving(folder, tokenizer) as service:
        await ingest(service)
        seen += await service.read(Resume("one", num_tokens(seen)))
    for sample in range(2):
        assert whole(seen, sample) == whole(wanted, sample)


async def test_failed_generation_is_removed_from_the_journal(folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(folder, tokenizer, FakeRanks(vocab=VOCAB, broken=[(0, 9)])) as service:
        with pytest.raises(Exception, match="token 9 of the answer"):
            await service.read(asked(SAMPLING))
        assert not files(folder)


async def test_interrupted_generation_continues_in_the_next_service(folder: Path, tokenizer: Tokenizer) -> None:
    """Its client received the loss of the last rank."""
    with pytest.raises(RankLost):
        async with serving(folder, tokenizer, FakeRanks(vocab=VOCAB, lose_at=12)) as service:
            await service.read(asked(SAMPLING))
    assert files(folder)
    async with serving(folder, tokenizer) as service:
        found = whole(await service.read(Resume("one", 0)))
        wanted = whole(await service.read(msgspec.structs.replace(asked(SAMPLING), request_id="other")))
        assert found == wanted


async def test_stopped_service_leaves_generations_in_the_journal(folder: Path, tokenizer: Tokenizer) -> None:
    ranks = HaltingRanks()
    async with serving(folder, tokenizer, ranks) as service:
        reading = asyncio.create_task(service.read(asked(SAMPLING)))
        await ranks.halts.wait()
        service.engine.end_streams()
        with pytest.raises(Unavailable, match="stopping"):
            await reading
        ranks.goes_on.set()
    assert files(folder)
    async with serving(folder, tokenizer) as service:
        assert len(whole(await service.read(Resume("one", 0)))[0]) == 30


class HaltingRanks(FakeRanks):
    """Ranks that wait in their eighth step."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)
        self.halts, self.goes_on = asyncio.Event(), asyncio.Event()

    async def step(self, plan: StepPlan) -> StepResult:
        if plan.step == 8:
            self.halts.set()
            await self.goes_on.wait()
        return await super().step(plan)


async def test_token_that_cannot_be_written_is_not_sent(folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(folder, tokenizer) as service:
        async with aclosing(service.generation.run(asked(SAMPLING))) as events:
            while not isinstance(await anext(events), Delta):
                pass
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (files(folder)[0].stat().st_size, hard))
            try:
                with pytest.raises(StorageUnavailable):
                    _ = [event async for event in events]
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not files(folder)
        assert len(whole(await service.read(asked(SAMPLING)))[0]) == 30


async def test_resumed_generation_waits_where_a_new_one_is_refused(folder: Path, tokenizer: Tokenizer) -> None:
    await begin(folder, tokenizer)
    async with serving(folder, tokenizer) as service:
        submit, refusals = service.engine.submit, iter([ResourceExhausted("queue", "full", 0.001)] * 3)

        def refusing(prompt):  # type: ignore[no-untyped-def]
            if (error := next(refusals, None)) is not None:
                raise error
            return submit(prompt)

        service.engine.submit = refusing  # type: ignore[method-assign]
        assert len(whole(await service.read(Resume("one", 0)))[0]) == 30
        assert next(refusals, None) is None


async def test_generation_that_no_longer_fits_is_refused(folder: Path, tokenizer: Tokenizer) -> None:
    """The pool of the new service is too small."""
    await begin(folder, tokenizer)
    async with serving(folder, tokenizer, FakeRanks(num_blocks=5, vocab=VOCAB)) as service:
        with pytest.raises(InvalidArgument, match="the pool of all ranks has"):
            await service.read(Resume("one", 0))


async def test_penalties_include_previous_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(max_tokens=30, frequency_penalty=1.0, repetition_penalty=1.5, temperature=1.0, seed=77)
    async with serving(folder, tokenizer) as service:
        seen = await service.read(asked(sampling, 2), 7)
    async with serving(folder, tokenizer) as service:
        again = await service.read(Resume("one", num_tokens(seen)))
    first = {row.terms.sampling.seed: row for row in rows(service.ranks) if row.terms is not None}
    assert first.keys() == {77, 78}
    for sample in range(2):
        row = first[77 + sample]
        assert row.terms is not None
        assert row.terms.seen is not None
        reported = whole([*seen, *again], sample)[0]
        assert row.token_index == len(row.terms.seen.generated) > 0
        assert list(row.terms.seen.generated) == reported[: row.token_index]
        known = set(row.terms.seen.token_ids)
        assert set(ids("a question")) <= known <= set(ids("a question")) | set(reported[: row.token_index])


def rows(ranks: FakeRanks) -> list[Row]:
    return [row for plan in ranks.plans if isinstance(plan.work, Decode) for row in plan.work.rows]


async def test_generation_that_is_not_resumable_is_not_written(folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(folder, tokenizer) as service:
        request = msgspec.structs.replace(asked(SAMPLING), resume_seconds=0.0)
        await service.read(request)
        assert not files(folder)


async def test_many_generations_are_resumed_concurrently(folder: Path, tokenizer: Tokenizer) -> None:
    """There are more generations than queue slots."""
    requests = [msgspec.structs.replace(asked(SAMPLING), request_id=f"r{i}") for i in range(40)]
    async with serving(folder, tokenizer) as service:
        for request in requests:
            await service.read(request, 4)
    assert CONFIG.max_waiting + CONFIG.max_sequences < len(requests)
    async with serving(folder, tokenizer) as service:
        found = await asyncio.gather(*(service.read(Resume(request.request_id, 0)) for request in requests))
        assert {tuple(whole(events)[0]) for events in found} == {tuple(whole(found[0])[0])}
