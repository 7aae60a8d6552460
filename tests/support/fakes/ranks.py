"""Fakes for tests of the code above the control channel: ranks without processes, and a fleet without slots."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from coordinator.cluster.loss_history import is_replacing
from coordinator.cluster.ports import EpochEnd, Formation, OnDeath
from longleaf.config import EngineConfig
from longleaf.errors import DataLoss, GroupFailed, RankLost, StartError, StorageUnavailable
from longleaf.positions import EVERY_RANK, Rotary, WindowSpec
from longleaf.rank_protocol.group_messages import KvLayout, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.rank_spec import ConnectInfo
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.snapshots import Fetch, Save, Saved
from longleaf.rank_protocol.step import Attention, Decode, Prefill, Restore, Row, StepPlan, StepResult
from longleaf.rank_protocol.verdict import Verification
from longleaf.runs import Run
from longleaf.sampling import Logprobs, Token
from longleaf.types import Loss
from tests.support.fakes.echo_model import FULL_LAYER, VOCAB, echo_attention, echo_scores, echo_spans, echo_tokens


def equal(row: Row) -> Verification:
    """Return a comparison in which all tokens up to this row are equal."""
    num_tokens = row.token_index + 1
    return Verification(
        max_logit=1.0, compared_tokens=num_tokens, equal_tokens=num_tokens, holding_ranks=1, dtype="float32"
    )


def positions_of(runs: Iterable[Run]) -> frozenset[int]:
    return frozenset(position for run in runs for position in range(run.start, run.end))


class FakeRanks:
    """Answers every step immediately with `echo_tokens`; the logprob of each token is minus its id.

    Rank `lost_rank` dies in step number `lose_at`, if given. `rotary` and `windows` describe the model. `broken` lists
    non-finite values: the logits of a sequence at a token index, or the keys of a step's chunk at index None. Real
    ranks differ in each of these arguments; most tests set one.
    """

    def __init__(
        self,
        world_size: int = 1,
        num_blocks: int = 1024,
        vocab: int = VOCAB,
        lose_at: int = 0,
        lost_rank: int = 0,
        rotary: Rotary | None = None,
        windows: WindowSpec | None = None,
        broken: Collection[tuple[int, int | None]] = (),
    ) -> None:
        self.broken = broken
        self.world_size = world_size
        self.num_blocks = num_blocks
        self.vocab = vocab
        self.lose_at = lose_at
        self.lost_rank = lost_rank
        self.rotary = rotary or Rotary()
        self.windows = windows
        self.plans: list[StepPlan] = []
        self.is_closed = False
        self._last: dict[int, int] = {}
        self._asking: set[int] = set()
        """Sequences that request logprobs."""
        self._sequences = RowState(block_size=1)
        self._starts: dict[int, int] = {}
        """The first positions of the segments."""
        self._changed = asyncio.Event()
        self._end: EpochEnd | None = None
        self.members = list(range(world_size))
        """The live members, in rank order."""
        self.joinable: list[int] = []
        """Members that have loaded the model and are in no epoch."""
        self.losses: tuple[Loss, ...] = ()
        self.missing_weights = 0.0
        self.layouts: list[KvLayout] = []
        self.pieces: dict[str, frozenset[int]] = {}
        """The positions of each piece on storage, by name. A test damages a piece by removing some of them."""
        self.fetched: dict[tuple[int, int], frozenset[int]] = {}
        """The fetched positions by member and ticket."""
        self.storage_error = ""
        """The reason why the storage is unavailable; empty if it is available."""

    async def start(self, epoch: int) -> Formation:
        return await self.form(epoch)

    async def form(self, epoch: int) -> Formation:
        self.members, self.joinable = [*self.members, *self.joinable], []
        if not self.members:
            assert self._end is not None
            raise self._end.error
        self._end = None
        self._last.clear()
        self._asking.clear()
        self._sequences = RowState(block_size=1)
        ready = Ready(
            member=0,
            device="cpu",
            dtype="float32",
            num_blocks=self.num_blocks,
            bytes_per_token=64,
            rotary=self.rotary,
            full_layers=(FULL_LAYER,) if self.windows is None else (),
            windows=self.windows,
            epoch=epoch,
            form="fake",
            form_of_windows="fake windows" if self.windows else "",
        )
        hellos = tuple(Hello(member, "fake", "127.0.0.1", 1000 + member) for member in self.members)
        return Formation(
            epoch, hellos, tuple(replace(ready, member=member) for member in self.members), cast(Any, self)
        )

    async def send_layout(self, layout: KvLayout) -> None:
        self.layouts.append(layout)
        self._starts = {segment.segment: segment.start for segment in layout.segments}

    async def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if plan.step == self.lose_at:
            self.lose(self.lost_rank, "died on request", plan.step)
        if self._end is not None:
            raise self._end.error
        if isinstance(plan.work, Restore):
            self._check(plan.work)
        rows = plan.work.rows if isinstance(plan.work, Decode) else ()
        if isinstance(plan.work, Prefill):
            self._starts.setdefault(plan.work.path[-1], plan.work.start)
        self._forget(plan.release_sequences)
        return StepResult(
            plan.epoch,
            plan.step,
            {row.sequence: self._sample(row) for row in rows if row.token_index >= 0},
            seconds=1e-6,
            not_finite=tuple(row.sequence for row in rows if (row.sequence, row.token_index) in self.broken),
            has_finite_keys=(plan.step, None) not in self.broken,
            comparisons={row.sequence: equal(row) for row in rows if row.is_compared},
            attention=self._attention(plan),
            scores={
                row.sequence: echo_scores(row.token_ids[-row.num_scored :], row.hidden)
                for row in rows
                if row.num_scored
            },
        )

    def _attention(self, plan: StepPlan) -> dict[int, tuple[Attention, ...]]:
        """Return the attention of the rows that request it; empty for models with windows, which do not support it."""
        if self.windows is not None or not isinstance(plan.work, Decode):
            return {}
        rows = self._sequences.complete(plan).work
        assert isinstance(rows, Decode)
        found = dict[int, tuple[Attention, ...]]()
        for row in rows.rows:
            self._starts.setdefault(row.path[-1], row.start)
            if (requested := row.spans) is None:
                continue
            starts = [self._starts[segment] for segment in row.path[: requested.num_segments + 1]]
            spans = echo_spans(starts[:-1], starts[-1], requested.size)
            last = row.start + row.num_tokens - 1
            positions = range(last - len(row.draft_ids), last + 1)
            found[row.sequence] = tuple(echo_attention(spans, row.hidden, position) for position in positions)
        return found

    def _check(self, work: Restore) -> None:
        """Raises AssertionError if a member has not fetched the data that it must restore."""
        wanted = [(self.members[run.rank], part.ticket, run) for part in work.portions for run in part.runs]
        wanted += [(member, work.window_ticket, run) for run in work.window_runs for member in self.members]
        for member, ticket, run in wanted:
            there = self.fetched.get((member, ticket))
            assert there is not None, f"member {member} has fetched nothing under ticket {ticket}"
            assert there >= positions_of([run]), f"member {member} has not fetched {run}"

    async def save(self, member: int, order: Save) -> Saved:
        ranks = {EVERY_RANK if order.of_windows else self._rank_of(member)}
        assert {run.rank for run in order.runs} == ranks, "the member does not hold the runs that it must save"
        self._check_storage()
        self.pieces[order.name] = positions = positions_of(order.runs)
        return Saved(member, order.ticket, len(positions), order.name)

    async def fetch(self, member: int, order: Fetch) -> None:
        self._rank_of(member)
        self._check_storage()
        if len(self.pieces.get(order.name, ())) != order.num_bytes:
            raise DataLoss(order.name, "it is not as it was written")
        self.fetched[member, order.ticket] = self.pieces[order.name]

    async def discard(self, member: int, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self.fetched.pop((member, ticket), None)

    def _rank_of(self, member: int) -> int:
        """Raises RankLost for a member that is gone."""
        if member not in self.members:
            raise RankLost(member, "it is gone")
        return self.members.index(member)

    def _check_storage(self) -> None:
        if self.storage_error:
            raise StorageUnavailable(self.storage_error)

    def _forget(self, sequences: tuple[int, ...]) -> None:
        for sequence in sequences:
            self._last.pop(sequence, None)
            self._asking.discard(sequence)

    def _sample(self, row: Row) -> tuple[Token, ...]:
        if row.terms is not None and row.terms.sampling.num_logprobs is not None:
            self._asking.add(row.sequence)
        last = row.token_ids[-1] if row.token_ids else self._last[row.sequence]
        token_ids = echo_tokens(last, row.token_index, row.draft_ids, self.vocab)
        self._last[row.sequence], is_asking = token_ids[-1], row.sequence in self._asking
        return tuple(Token(token_id, Logprobs(-float(token_id), ()) if is_asking else None) for token_id in token_ids)

    def lose(self, rank: int, reason: str, *steps: int) -> None:
        """Lose a rank in one of these steps, or between steps if none is given."""
        self._end = EpochEnd(RankLost(rank, reason), steps)
        self.members.pop(rank)
        self._change()

    def break_epoch(self, reason: str, *steps: int) -> None:
        """End the epoch; all ranks stay alive."""
        self._end = EpochEnd(GroupFailed(reason), steps)
        self._change()

    def load(self, member: int) -> None:
        """Add a member that has loaded the model."""
        self.joinable.append(member)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_ended(self) -> EpochEnd:
        while self._end is None:
            await self._changed.wait()
        return self._end

    async def wait_joinable(self) -> None:
        while not self.joinable:
            await self._changed.wait()

    async def wait_ready(self) -> None:
        while is_replacing(self.losses):
            await self._changed.wait()

    def publish(self, losses: tuple[Loss, ...]) -> None:
        """Set the losses and notify the waiters."""
        self.losses = losses
        self._change()

    async def close(self) -> None:
        self.is_closed = True


class FakeFleet:
    """A fleet without slots: `reserve` sets `requested` and waits forever."""

    def __init__(self, num_missing: int) -> None:
        self.num_missing = num_missing
        self.patience = 0.0
        self.requested = asyncio.Event()

    async def reserve(self, config: EngineConfig, patience: float = 0.0) -> str:
        self.patience = patience
        self.requested.set()
        return await asyncio.get_running_loop().create_future()

    async def rank_memory(self) -> int | None:
        return None

    async def launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo], on_death: OnDeath) -> None:
        raise AssertionError("there is no place")

    def location_of(self, member: int) -> str:
        return ""

    async def kill(self, member: int) -> None:
        """There is no process to kill."""

    async def replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        raise StartError("there is no place")

    async def shutdown(self) -> None:
        """There is nothing to shut down."""
