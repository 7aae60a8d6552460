"""Keys of windowed layers on every rank: their placement, their lifetime, and the positions that can be continued."""

import pytest

from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.contexts import LAST_ENDS
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.positions import EVERY_RANK, AttentionSpan, WindowSpec
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan
from longleaf.runs import Run
from tests.support.scheduling import Asker, kinds

WINDOW = WindowSpec(reaches=(AttentionSpan(8),), num_blocks=40)


def window_runs(plans: list[StepPlan]) -> list[list[tuple[int, int, int]]]:
    """First position, end and number of blocks of each run, by plan."""
    found: list[list[tuple[int, int, int]]] = []
    for plan in map(RowState(4).complete, plans):
        work = plan.work if isinstance(plan.work, Prefill) else plan.work.rows[0]
        assert all(run.rank == EVERY_RANK for run in work.window_runs)
        found.append([(run.start, run.end, len(run.blocks)) for run in work.window_runs])
    return found


def test_document_keeps_the_window_before_its_end() -> None:
    bench = Asker(windows=WINDOW)
    bench.ingest("doc", 40)
    # each chunk stores the window of the next token and keeps the window of its own first token
    assert window_runs(bench.run()) == [[(25, 32, 2)], [(25, 32, 2), (33, 40, 2)]]
    (segment,) = bench.scheduler.contexts.get("doc").path.segments
    assert [(run.start, run.end) for run in bench.scheduler.segments.placements[segment].window_runs] == [(33, 40)]
    assert bench.placer.num_free == bench.placer.num_blocks - BlockCount(10, 2)


def test_chunks_shorter_than_the_window_share_a_run() -> None:
    bench = Asker(windows=WINDOW, chunk_size=4)
    bench.ingest("doc", 17)
    expected = [[(0, 4, 1)], [(0, 8, 2)], [(0, 12, 3)], [(4, 16, 3)], [(8, 17, 3)]]
    assert window_runs(bench.run()) == expected


def test_answer_advances_windows_by_whole_blocks() -> None:
    bench = Asker(windows=WINDOW)
    job = bench.ask(3, max_tokens=14)
    found = window_runs(bench.run())
    assert found[0] == [(0, 3, 1)]
    assert found[7:10] == [[(0, 10, 3)], [(0, 11, 3)], [(4, 12, 2)]]  # the token at 11 sees positions from 4
    assert found[10:] == [[(4, 13, 3)], [(4, 14, 3)], [(4, 15, 3)], [(8, 16, 2)]]
    assert bench.tokens(job) == bench.alone(3, 14)
    assert bench.placer.num_free == bench.placer.num_blocks


def test_sections_keep_no_windows_at_their_ends() -> None:
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(section=16),), num_blocks=40))
    bench.ingest("doc", 32)
    assert window_runs(bench.run()) == [[]]
    job = bench.ask(3, context="doc")
    assert window_runs(bench.run())[0] == [(32, 35, 1)]
    assert len(bench.tokens(job)) == 4


def test_paths_split_where_sections_begin() -> None:
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(section=8), AttentionSpan(section=12)), num_blocks=40))
    bench.ingest("doc", 61)
    bench.run()
    bench.scheduler.fork_context("doc", "fork", 24)
    with pytest.raises(InvalidArgument, match="30: .* or a section begins, nearest at 24 or 48; "):
        bench.scheduler.fork_context("doc", "other", 30)
    on_fork, alike = bench.ask(20, context="fork"), bench.prompt([*range(50), *range(500, 530)])
    bench.run()
    assert bench.tokens(on_fork) == bench.alone(20, 4)
    assert bench.cached(alike) == 48


def forked() -> Asker:
    """`doc` of segments [0, 40) and [40, 43), which leave [33, 40) and [36, 43)."""
    bench = Asker(windows=WINDOW)
    for count, append in ((40, False), (3, True)):
        bench.ingest("doc", count, append=append)
        bench.run()
    return bench


@pytest.mark.parametrize("position", [40, 41, 43])
def test_context_forks_where_its_window_is_retained(position: int) -> None:
    bench = forked()
    bench.scheduler.fork_context("doc", "fork", position)
    bench.scheduler.audit()
    job = bench.ask(9, context="fork")
    bench.run()
    assert len(bench.tokens(job)) == 4


@pytest.mark.parametrize(("position", "nearest"), [(1, "at 40"), (39, "at 40")])
def test_fork_without_a_window_is_refused_with_the_nearest_positions(position: int, nearest: str) -> None:
    bench = forked()
    with pytest.raises(InvalidArgument, match=f"{nearest}; with --window-keys sharded") as caught:
        bench.scheduler.fork_context("doc", "fork", position)
    assert caught.value.field == "token_count"
    bench.ingest("doc", 40, append=True)
    bench.run()
    with pytest.raises(InvalidArgument, match="70: .* nearest at 43 or 83; "):
        bench.scheduler.fork_context("doc", "fork", 70)


def test_prompt_continues_from_the_end_of_a_previous_one() -> None:
    bench = Asker(windows=WINDOW)
    first = bench.prompt(range(41))
    bench.run()
    job = bench.prompt([*range(60), 500])  # begins with the 40 prefilled tokens of the first one
    bench.run()
    same, other = bench.prompt(range(41)), bench.prompt([*range(50), *range(500, 511)])  # the second one ended at 60
    bench.run()
    assert [bench.cached(found) for found in (first, job, same, other)] == [0, 40, 40, 40]
    elsewhere = bench.prompt([*range(20), *range(500, 530)])
    bench.run()
    assert bench.cached(elsewhere) == 0


def test_shorter_prefix_is_used_if_the_longer_has_no_window() -> None:
    bench = Asker(windows=WINDOW)
    cached: list[int] = []
    for prompt in (range(61), range(25), [*range(30), *range(500, 520)]):
        job = bench.prompt(prompt)
        bench.run()
        cached.append(bench.cached(job))
    assert cached == [0, 0, 24]


def test_samples_have_separate_windows() -> None:
    bench = Asker(windows=WINDOW)
    job = bench.prompt(range(41), max_tokens=12, num_samples=3)
    plans = bench.run()
    rows = list(map(RowState(4).complete, plans))[-1].work
    assert isinstance(rows, Decode)
    assert len({block for row in rows.rows for run in row.window_runs for block in run.blocks}) == 3 * 2
    assert [bench.answer(job, sample) for sample in range(3)] == [bench.answer(job)] * 3


def test_too_small_window_pool_is_named() -> None:
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=9))
    with pytest.raises(InvalidArgument, match="the window pool has 36 tokens.*--window-bytes") as caught:
        bench.prompt(range(41), max_tokens=40)
    assert caught.value.field == "sampling.max_token_count"
    for number in range(3):
        bench.ingest(f"doc-{number}", 40)
        bench.run()
    with pytest.raises(ResourceExhausted, match="contexts use too many of 36;.*--window-bytes") as refused:
        bench.ingest("doc-3", 40)
    assert refused.value.subject == "window pool"
    assert refused.value.retry_seconds is None


def test_blocks_used_only_by_chunks_are_freed_for_other_jobs() -> None:
    """Two prompts need 5 + 2 blocks each while they are read, and 2 + 2 while they answer."""
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=11))
    for start in (0, 500):
        bench.prompt(range(start, start + 41), max_tokens=8)
    seen: list[int] = []
    while (plan := bench.schedule()) is not None:
        bench.commit(plan)
        seen.append(bench.scheduler.num_running)
    assert 2 in seen
    assert bench.scheduler.segments.make_room(bench.placer.num_blocks)


def test_window_pool_has_space_for_recompute() -> None:
    """3 tokens and 40 of an answer are rows in 4 blocks; preempted after 20, they are a chunk in 5 and rows in 4."""
    with pytest.raises(InvalidArgument, match="has 36 tokens in blocks of 4, and 40 are needed"):
        Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=9)).ask(3, max_tokens=40)
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=10), max_sequences=1)
    low = bench.ask(3, max_tokens=40)
    for _ in range(20):
        plan = bench.schedule()
        assert plan is not None
        bench.commit(plan)
    high = bench.ask(5, max_tokens=40, priority=3)
    assert kinds(bench.run()) == "D" * 40 + "P" + "D" * 20
    assert bench.tokens(high) == bench.alone(5, 40)
    assert bench.tokens(low) == bench.alone(3, 40)


def test_new_run_begins_where_the_last_one_is_not_visible() -> None:
    bench = Asker(windows=WINDOW)
    reservation = bench.placer.reserve(BlockCount(0, 5))
    assert reservation is not None
    runs = bench.placer.advance_windows((), 0, 10, reservation, is_chunk=True)
    assert runs == (Run(EVERY_RANK, 3, 10, (0, 1)),)
    runs = bench.placer.advance_windows(runs, 10, 30, reservation, is_chunk=True)
    assert runs == (Run(EVERY_RANK, 3, 10, (0, 1)), Run(EVERY_RANK, 23, 30, (2, 3)))
    runs = bench.placer.advance_windows(runs, 30, 31, reservation, is_chunk=False)
    assert runs == (Run(EVERY_RANK, 23, 31, (2, 3)),)
    assert reservation.left == BlockCount(0, 3)


def append(bench: Asker, *counts: int, context: str = "doc") -> None:
    """Appends documents one by one to a context, which is created if it is missing."""
    for count in counts:
        bench.ingest(context, count, append=context in bench.scheduler.contexts)
        bench.run()


def num_window_blocks(bench: Asker) -> int:
    """The blocks in use, without those of cached questions."""
    return bench.placer.window_pool.num_used - bench.scheduler.segments.num_reclaimable.windows


@pytest.mark.parametrize("num_appends", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_many_small_appends_keep_the_windows_of_the_last_ends(num_appends: int) -> None:
    """Each piece is in a separate block, and the next token sees 7 of them."""
    windows, rest = (
        WindowSpec(reaches=(AttentionSpan(8),), num_blocks=24),
        {"max_positions": 5000, "check_every": 3 * num_appends},
    )
    bench = Asker(blocks=(2100, 2100), windows=windows, **rest)
    append(bench, *[1] * num_appends)
    assert num_window_blocks(bench) == 7 + LAST_ENDS - 1
    append(bench, 40, 1, 1, context="other")  # space for other documents remains
    jobs = [bench.ask(3, context=context) for context in ("doc", "other")]
    bench.run()
    assert [bench.tokens(job) for job in jobs] == [bench.alone(3, 4)] * 2
    for context in ("doc", "other"):
        bench.scheduler.delete_context(context)
    assert num_window_blocks(bench) == 0
    bench.scheduler.audit()


def test_context_forks_only_at_its_last_ends() -> None:
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=60), blocks=(200, 200))
    append(bench, *[20] * (LAST_ENDS + 2))
    ends = [20 * number for number in range(3, LAST_ENDS + 3)]
    assert num_window_blocks(bench) == 2 * LAST_ENDS
    for end in ends:
        bench.scheduler.fork_context("doc", f"fork-{end}", end)
        bench.scheduler.audit()
    assert num_window_blocks(bench) == 2 * LAST_ENDS
    message = rf"one of its last {LAST_ENDS} documents ended \(at {', '.join(map(str, ends[:-1]))} or {ends[-1]}\), "
    with pytest.raises(InvalidArgument, match=f"40: .* {message}.*nearest at 60; with --window-keys sharded"):
        bench.scheduler.fork_context("doc", "other", 40)
    with pytest.raises(InvalidArgument, match=f"65: .* {message}.*nearest at 60 or 80; "):
        bench.scheduler.fork_context("doc", "other", 65)


def test_fork_keeps_the_previous_ends() -> None:
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=60), blocks=(200, 200))
    append(bench, 20, 20, 20)
    bench.scheduler.fork_context("doc", "fork", 40)
    bench.scheduler.delete_context("doc")
    assert num_window_blocks(bench) == 4
    bench.scheduler.fork_context("fork", "twig", 20)
    append(bench, *[20] * LAST_ENDS, context="fork")
    jobs = [bench.ask(9, context=context) for context in ("fork", "twig")]
    bench.run()
    assert [bench.tokens(job) for job in jobs] == [bench.alone(9, 4)] * 2
    bench.scheduler.delete_context("twig")
    assert num_window_blocks(bench) == 2 * LAST_ENDS


def test_jobs_that_use_an_end_keep_its_windows() -> None:
    """An answer from the first end is preempted and restarted after the context has grown far beyond that end."""
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=80), blocks=(200, 200), max_sequences=1)
    append(bench, 20)
    low = bench.ask(9, max_tokens=40, context="doc")
    waiting = bench.ask(5, context="doc")
    for _ in range(9):
        bench.step()
    for _ in range(LAST_ENDS + 2):
        bench.ingest("doc", 20, append=True)
        while bench.scheduler.contexts.get("doc").num_tokens % 20 or bench.scheduler._requests.ingests_into("doc"):
            bench.step()
    high = bench.ask(5, context="doc", priority=3)
    bench.run()
    assert [bench.tokens(job) for job in (low, waiting, high)] == [
        bench.alone(n, m) for n, m in ((9, 40), (5, 4), (5, 4))
    ]
    assert num_window_blocks(bench) == 2 * LAST_ENDS


def test_prompts_continue_from_a_context_without_retained_ends() -> None:
    """The cached part of a prompt that shares a context's prefix retains the keys that the prompt's end sees."""
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(16),), num_blocks=100), blocks=(200, 200))
    append(bench, 20)
    first = bench.prompt(
        [*range(20), *range(500, 508)]
    )  # the next token sees positions from 12 of the 27 cached tokens
    bench.run()
    assert bench.cached(first) == 20
    append(bench, *[20] * LAST_ENDS)
    again, longer = bench.prompt([*range(20), *range(500, 508)]), bench.prompt([*range(20), *range(500, 530)])
    bench.run()
    assert [bench.cached(job) for job in (again, longer)] == [27, 27]
    segments = bench.scheduler.segments
    assert segments.make_room(bench.placer.num_free + segments.num_reclaimable)
    bench.scheduler.audit()
    assert num_window_blocks(bench) == 4 * LAST_ENDS


def test_append_is_refused_before_the_window_pool_is_full() -> None:
    """The next token sees 7 tokens in separate blocks, and the earlier ends see 3 more: 10 blocks."""
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=20), blocks=(400, 400))
    append(bench, *[1] * 40, context="tiny")
    append(bench, *[1] * 9, context="other")
    num_free, paths = bench.placer.num_free, [context.path for context in bench.scheduler.contexts.list()]
    message = (
        "8 tokens are needed, and contexts use too many of 80; delete a context, or serve with more --window-bytes"
    )
    for context in ("tiny", "other"):
        with pytest.raises(ResourceExhausted, match=message) as caught:
            bench.ingest(context, 1, append=True)
        assert (caught.value.subject, caught.value.retry_seconds) == ("window pool", None)
    assert [context.path for context in bench.scheduler.contexts.list()] == paths
    assert (bench.placer.num_free, bench.schedule()) == (num_free, None)
    bench.scheduler.delete_context("tiny")
    append(bench, *[1] * 30, context="other")
    assert num_window_blocks(bench) == 10


def test_full_window_pool_of_a_context_is_not_blamed_on_the_text() -> None:
    bench = Asker(windows=WindowSpec(reaches=(AttentionSpan(8),), num_blocks=10), blocks=(400, 400))
    append(bench, *[1] * 9)
    for refused in (lambda: bench.ingest("doc", 1, append=True), lambda: bench.ask(5, context="doc")):
        with pytest.raises(ResourceExhausted, match="contexts use too many of 40; delete a context") as caught:
            refused()
        assert caught.value.subject == "window pool"
