"""Ranks without processes, for tests of all that lies above the control channel."""

import asyncio
from collections.abc import Collection

from msgspec.structs import replace

from longleaf.channel.fakes import VOCAB, echo_token
from longleaf.channel.lives import Hello, Ready
from longleaf.channel.step import Comparison, Decode, Row, StepPlan, StepResult
from longleaf.errors import LongleafError, WorkerLost
from longleaf.geometry import Rotary, Windows
from longleaf.sampling import Logprobs, Token


def equal(row: Row) -> Comparison:
    """What ranks that agree say about an answer that they have not computed."""
    num_tokens = row.token_index + 1
    return Comparison(max_logit=1.0, num_tokens=num_tokens, num_equal=num_tokens, num_ranks=1, dtype="float32")


class FakeRanks:
    """Answers every step at once with `echo_token`, and minus the id for its logprob; rank `lost_rank` dies at step
    number `lose_at`, if given. The model's positions are as `rotary` says, and its windows as `windows`. What is
    not finite is in `broken`: the logits of a sequence at a token's index, the keys of a step's chunk at index None.
    Each argument is something in which real ranks differ, and most tests give one."""

    def __init__(
        self,
        world_size: int = 1,
        num_blocks: int = 1024,
        vocab: int = VOCAB,
        lose_at: int = 0,
        lost_rank: int = 0,
        rotary: Rotary | None = None,
        windows: Windows | None = None,
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
        """Sequences that ask for logprobs."""
        self._loss: asyncio.Future[LongleafError] | None = None

    @property
    def hellos(self) -> tuple[Hello, ...]:
        return tuple(Hello(rank, "fake", "127.0.0.1", 1000 + rank) for rank in range(self.world_size))

    async def start(self, epoch: int) -> tuple[Ready, ...]:
        ready = Ready(
            rank=0,
            device="cpu",
            dtype="float32",
            num_blocks=self.num_blocks,
            bytes_per_token=64,
            rotary=self.rotary,
            windows=self.windows,
        )
        return tuple(replace(ready, rank=rank) for rank in range(self.world_size))

    async def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if plan.step == self.lose_at:
            raise WorkerLost(self.lost_rank, "was told to die")
        rows = plan.work.rows if isinstance(plan.work, Decode) else ()
        self._forget(plan.release_sequences)
        return StepResult(
            plan.epoch,
            plan.step,
            {row.sequence: self._sample(row) for row in rows},
            seconds=1e-6,
            not_finite=tuple(row.sequence for row in rows if (row.sequence, row.token_index) in self.broken),
            has_finite_keys=(plan.step, None) not in self.broken,
            comparisons={row.sequence: equal(row) for row in rows if row.is_compared},
        )

    def _forget(self, sequences: tuple[int, ...]) -> None:
        for sequence in sequences:
            self._last.pop(sequence, None)
            self._asking.discard(sequence)

    def _sample(self, row: Row) -> Token:
        if row.terms is not None and row.terms.sampling.num_logprobs is not None:
            self._asking.add(row.sequence)
        last = row.token_ids[-1] if row.token_ids else self._last[row.sequence]
        token_id = self._last[row.sequence] = echo_token(last, row.token_index, self.vocab)
        return Token(token_id, Logprobs(-float(token_id), ()) if row.sequence in self._asking else None)

    def lose(self, rank: int, reason: str) -> None:
        """Loses a rank between steps."""
        self._future().set_result(WorkerLost(rank, reason))

    def _future(self) -> asyncio.Future[LongleafError]:
        self._loss = self._loss or asyncio.get_running_loop().create_future()
        return self._loss

    async def wait_lost(self) -> LongleafError:
        return await asyncio.shield(self._future())

    async def close(self) -> None:
        self.is_closed = True
