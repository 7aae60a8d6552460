"""A scheduler without ranks: plans are executed by arithmetic."""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from coordinator.engine_messages import (
    Acknowledged,
    Admitted,
    DocumentPrompt,
    Event,
    Failed,
    Outcome,
    Prompt,
    SchedulingParams,
    Sealed,
    SpanLayout,
    Tokens,
)
from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.positions import Positions
from coordinator.recovery.recovery import MOVED_BLOCKS
from coordinator.scheduling.scheduler import Scheduler
from longleaf.config import EngineConfig
from longleaf.errors import LongleafError
from longleaf.positions import Rotary, WindowSpec
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Prefill, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from tests.support.fakes.echo_model import drafted_ends, echo_token
from tests.support.fakes.workers import EchoBlockTable
from tests.support.random_drafter import RandomDrafter
from tests.support.shadow_window_cache import ShadowWindowCache


class Bench:
    """A scheduler whose plans are executed by arithmetic, with the laws checked after each step."""

    def __init__(
        self,
        *,
        blocks: tuple[int, ...] = (64, 64),
        max_positions: int = 2000,
        windows: WindowSpec | None = None,
        rotary: Rotary | None = None,
        check_every: int = 1,
        max_moved_blocks: int = MOVED_BLOCKS,
        is_durable: bool = False,
        drafts: str = "",
        **changes: object,
    ) -> None:
        """`drafts`: of which kind they are, see `RandomDrafter`; empty: as anywhere."""
        settings: dict[str, object] = {"model": "none", "chunk_size": 32, "block_size": 4, "replicate_below": 8}
        self.config = EngineConfig(**(settings | changes))  # type: ignore[arg-type]
        self.placer = BlockPlacer(blocks, self.config.block_size, windows)
        positions = Positions(rotary or Rotary(), max_positions)
        drafter = RandomDrafter(self.config, drafts) if drafts else None
        self.scheduler = Scheduler(
            self.config, self.placer, positions, 1, max_moved_blocks, is_durable=is_durable, drafter=drafter
        )
        self.sequences = RowState(self.placer.window_block_size)
        self.block_table = EchoBlockTable(self.config.block_size)
        self.shadow_window_cache = ShadowWindowCache(windows, self.config.block_size) if windows else None
        self.seen: dict[int, list[Event | Failed | Sealed | Acknowledged | LongleafError]] = {}
        self.num_jobs = 0
        self.seconds_per_token = 1e-6
        self._check_every = check_every
        """So many requests and steps; checks of much that is held take long."""
        self._num_unchecked = 0

    def ask(
        self,
        count: int,
        max_tokens: int = 4,
        context: str | None = None,
        ends: tuple[int, ...] = (),
        priority: int = 0,
        num_samples: int = 1,
        sampling: SamplingParams | None = None,
        cuts: SpanLayout | None = None,
        max_draft_tokens: int = 0,
        grammar: str = "",
        **scheduling: Any,
    ) -> int:
        prompt = Prompt(
            context=context,
            token_ids=tuple(range(count)),
            sampling=replace(sampling or SamplingParams(), max_tokens=max_tokens),
            end_tokens=frozenset(ends),
            scheduling=SchedulingParams(priority=priority, **scheduling),
            num_samples=num_samples,
            cuts=cuts,
            max_draft_tokens=max_draft_tokens,
            grammar=grammar,
        )
        job = self._admitted(lambda job: self.scheduler.admit(job, prompt))
        self.num_jobs += num_samples - 1
        return job

    def ingest(self, context: str, count: int, append: bool = False) -> int:
        document = DocumentPrompt(context=context, token_ids=list(range(count)), append=append)
        return self._admitted(lambda job: self.scheduler.admit(job, document))

    def _admitted(self, admit: Callable[[int], object]) -> int:
        try:
            admit(self.num_jobs)
        finally:
            self._check()
        self.num_jobs += 1
        return self.num_jobs - 1

    def _check(self) -> None:
        self._num_unchecked += 1
        if self._num_unchecked >= self._check_every:
            self.scheduler.audit()
            self._num_unchecked = 0

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self._see(self.scheduler.pop_outcomes())
        self._check()
        return plan

    def commit(self, plan: StepPlan, result: StepResult | None = None) -> None:
        """Commits with `result`, or with a computed result."""
        self._see(self.scheduler.commit(plan, result or self._result(plan), now=9.0))
        self._check()

    def _result(self, plan: StepPlan) -> StepResult:
        plan = self.sequences.complete(plan)
        if self.shadow_window_cache:
            self.shadow_window_cache.apply(plan)
        tokens = self.block_table.apply(plan)
        for row, end in drafted_ends(plan, tokens):
            self.sequences.cut_back(row.sequence, end)
            if self.shadow_window_cache:
                self.shadow_window_cache.cut_back(row.path[-1], end)
        return StepResult(plan.epoch, plan.step, tokens, seconds=plan.num_tokens * self.seconds_per_token)

    def _see(self, outcomes: Iterable[Outcome]) -> None:
        for job, outcome in outcomes:
            self.seen.setdefault(job, []).append(outcome)

    def acknowledge(self, document: int) -> None:
        """The sealed document of an ingest is durable."""
        [sealed] = [outcome for outcome in self.seen[document] if isinstance(outcome, Sealed)]
        self.scheduler.acknowledge(sealed.job, 9.0)

    def step(self) -> StepPlan | None:
        """Plans and does one step, if there is something to do."""
        if (plan := self.schedule()) is not None:
            self.commit(plan)
        return plan

    def run(self) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        return plans

    @staticmethod
    def alone(count: int, max_tokens: int) -> list[int]:
        """The answer to a prompt of `count` tokens."""
        answer = [count - 1]
        for index in range(max_tokens):
            answer.append(echo_token(answer[-1], index))
        return answer[1:]

    def tokens(self, job: int) -> list[int]:
        return [t for event in self.seen[job] if isinstance(event, Tokens) for t in event.token_ids]


def kinds(plans: list[StepPlan]) -> str:
    return "".join("P" if isinstance(plan.work, Prefill) else "D" for plan in plans)


class Asker(Bench):
    """A bench whose prompts are given token by token."""

    def prompt(
        self,
        token_ids: range | list[int],
        max_tokens: int = 4,
        num_samples: int = 1,
        seed: int = 0,
        context: str | None = None,
        **options: Any,
    ) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        prompt = Prompt(
            context=context, token_ids=tuple(token_ids), sampling=sampling, num_samples=num_samples, **options
        )
        job = self._admitted(lambda job: self.scheduler.admit(job, prompt))
        self.num_jobs += num_samples - 1
        return job

    def cached(self, job: int) -> int:
        return next(event.cached_tokens for event in self.seen[job] if isinstance(event, Admitted))

    def answer(self, job: int, sample: int = 0) -> list[int]:
        events = [event for event in self.seen[job] if isinstance(event, Tokens)]
        return [token for event in events if event.sample == sample for token in event.token_ids]

    def read(self, plans: list[StepPlan]) -> int:
        return sum(len(plan.work.token_ids) for plan in plans if isinstance(plan.work, Prefill))
