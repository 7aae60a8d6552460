"""A scheduler whose ranks come and go, over a ledger of the keys that they hold."""

from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.recovery.fault_score import BREAK_SCORE
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import StepPlan, StepResult
from tests.support.fakes.echo_model import drafted_ends
from tests.support.scheduling import Bench
from tests.support.shadow_key_cache import ShadowKeyCache


class Group(Bench):
    """A bench whose ranks come and go."""

    def __init__(self, num_ranks: int = 4, num_blocks: int = 64, **changes: object) -> None:
        super().__init__(blocks=(num_blocks,) * num_ranks, **changes)  # type: ignore[arg-type]
        windows = self.placer.windows
        self.keys = ShadowKeyCache(num_ranks, self.config.block_size, windows)
        self.epoch = 1

    def _result(self, plan: StepPlan) -> StepResult:
        plan = self.sequences.complete(plan)
        tokens = self.keys.apply(plan)
        for row, end in drafted_ends(plan, tokens):
            self.sequences.cut_back(row.sequence, end)
        return StepResult(plan.epoch, plan.step, tokens, seconds=plan.num_tokens * self.seconds_per_token)

    def change(
        self,
        *before: int | None,
        steps: tuple[int, ...] = (),
        suspicion: int = BREAK_SCORE,
        may_grow: bool = False,
    ) -> None:
        """An epoch of these ranks of the one before; None is a new one. That one ended in one of `steps`."""
        self.scheduler.job_recovery.roll_back(steps, suspicion)
        self.epoch += 1
        self.keys.change_ranks(before)
        num_blocks = (self.placer.pools[0].num_blocks,) * len(before)
        self.scheduler.job_recovery.change_ranks(RankMapping(self.epoch, before, num_blocks), may_grow=may_grow)
        self.keys.set_layout(self.scheduler.segments.layout())
        self.sequences = RowState(self.placer.window_block_size)
        self._see(self.scheduler.pop_outcomes())
        self._check()

    def document(self, context: str, count: int, append: bool = False) -> None:
        self.ingest(context, count, append)
        self.run()

    def contexts(self) -> list[str]:
        return [context.id for context in self.scheduler.contexts.list()]

    def holds(self, context: str) -> bool:
        path = self.scheduler.contexts.get(context).path
        return self.scheduler.segments.placements.holds(path) and bool(self.keys.chain(path.ids, path.end))
