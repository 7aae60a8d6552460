"""A scheduler to which clients come at random, and two fleets that do the same steps."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from longleaf.errors import LongleafError
from longleaf.kernels.gpu.launch import Launcher
from longleaf.positions import Rope
from longleaf.rank_protocol.step import Decode, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from tests.support.accelerator.captured import DeviceFleet
from tests.support.fakes.echo_model import VOCAB
from tests.support.golden.short import shorten
from tests.support.scheduling import Bench
from workers.rank_runtime import StepHandle
from zoo.checkpoints import make_checkpoint
from zoo.families import Family

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=3, seed=2),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02, repetition_penalty=1.2, seed=3),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, logit_bias={5: 2.0}),
    SamplingParams(num_logprobs=0),
)
REPEATED = (
    SamplingParams(logit_bias={5: 90.0}),
    SamplingParams(logit_bias={5: 90.0, 6: 88.0}, frequency_penalty=0.7, num_logprobs=2),
    SamplingParams(logit_bias={3: 9.0, 4: 9.0}, temperature=1.0, seed=4),
    SamplingParams(
        logit_bias={7: 40.0, 2: 40.0}, temperature=0.9, top_k=3, repetition_penalty=1.05, num_logprobs=0, seed=5
    ),
    SamplingParams(),
)
"""With answers that repeat themselves, so that drafts are right now and then."""
MOST_DRAFTS = 3
SIZES = {"chunk_size": 8, "block_size": 4, "replicate_below": 6, "max_sequences": 6, "merge": "exchange"}


def small_checkpoints(root: Path) -> Callable[[Family], Path]:
    """The checkpoint of a family, made at first use."""

    def get(family: Family) -> Path:
        folder = root / family
        if not folder.exists():
            folder.mkdir()
            make_checkpoint(folder, family, num_layers=2, hidden=32, vocab_size=VOCAB)
            shorten(folder / "config.json")
        return folder

    return get


def fleets(folder: Path, settings: dict[str, Any], *launchers: Launcher) -> list[DeviceFleet]:
    """Of which the first one is not captured."""
    settings = {**SIZES, "kv_bytes": 24_000, **settings}
    return [DeviceFleet(folder, launcher, is_captured=i > 0, **settings) for i, launcher in enumerate(launchers)]


class Drive:
    """A scheduler with random clients. Two fleets execute each plan, and their results are compared.

    One executes a step at a time; the other begins the next step before the previous tokens are collected.
    """

    def __init__(self, eager: DeviceFleet, captured: DeviceFleet, seed: int, *, drafts: str = "") -> None:
        """With drafts of a kind (see `RandomDrafter`), the sampled tokens come from the ranks."""
        self.eager, self.captured = eager, captured
        self._drafts = drafts
        self.dice = random.Random(seed)
        ready, config = eager.readies[0], eager.config
        self.bench = Bench(
            blocks=tuple(found.num_blocks for found in eager.readies),
            max_positions=80,
            windows=ready.windows,
            rotary=ready.rotary if config.allow_long else None,
            allow_long=config.allow_long,
            model=config.model,
            world_size=config.world_size,
            window_keys=config.window_keys,
            drafts=drafts,
            max_draft_tokens=MOST_DRAFTS if drafts else 0,
            **{
                name: getattr(config, name) for name in ("chunk_size", "block_size", "replicate_below", "max_sequences")
            },
        )
        self.seen = Counter[str]()
        self._num_contexts = 0
        self._under_way: list[tuple[StepPlan, StepResult]] = []
        self._pending: list[tuple[list[StepHandle], StepResult]] = []
        self._ropes: dict[int, Rope] = {}

    def run(self, num_steps: int) -> None:
        while self.seen["decode"] < num_steps:
            if self.dice.random() < 0.35:
                with suppress(LongleafError):
                    self._act()
            plan = self.bench.schedule() if len(self._under_way) < 2 else None
            if plan is not None:
                self._begin(plan)
            elif self._under_way:
                self._commit()
        while self._under_way:
            self._commit()

    def _act(self) -> None:
        """Performs a random client action."""
        contexts = [context.id for context in self.bench.scheduler.contexts.list()]
        context = self.dice.choice([None, *contexts])
        match self.dice.choice(("ask", "ask", "ask", "several", "ingest", "fork", "cancel", "delete")):
            case "ask" | "several" as what:
                num_samples = self.dice.choice((2, 3)) if what == "several" else 1
                count, num_new = self.dice.randint(1, 12), self.dice.randint(1, 12)
                sampling = self.dice.choice(REPEATED if self._drafts else SAMPLINGS)
                most = MOST_DRAFTS if self._drafts else 0
                requested = {"sampling": sampling, "num_samples": num_samples, "max_draft_tokens": most}
                self.bench.ask(count, num_new, context, **requested)
                self.seen[what] += 1
            case "ingest":
                self._num_contexts += 1
                self.bench.ingest(f"c{self._num_contexts}", self.dice.randint(1, 20))
            case "fork" if context:
                self._num_contexts += 1
                self.bench.scheduler.fork_context(context, f"c{self._num_contexts}")
                self.seen["fork"] += 1
            case "cancel":
                self.bench.scheduler.cancel(self.dice.randrange(max(1, self.bench.num_jobs)))
            case "delete" if len(contexts) > 2 and context:
                self.bench.scheduler.delete_context(context)
            case _:
                pass

    def _begin(self, plan: StepPlan) -> None:
        wanted = self.eager.execute(plan)
        if not plan.may_overlap:
            self._check_pending()
        else:
            self.seen["ahead"] += bool(self._pending)
        self._pending.append((self.captured.start(plan), wanted))
        self._under_way.append((plan, wanted))
        assert torch.equal(self.captured.logits, self.eager.logits)
        assert self.captured.same_keys(self.eager)
        if len(self._pending) > 1:
            self._check()
        if isinstance(work := plan.work, Decode):
            self.seen["decode"] += 1
            self.seen["mixed ropes"] += len(self._ropes_of(work)) > 1
            self.seen[f"{plan.num_tokens} rows"] += 1
            for row in work.rows:
                if row.draft_ids:
                    num_accepted = len(wanted.tokens[row.sequence]) - 1
                    self.seen["accepted"] += num_accepted
                    self.seen["refused"] += num_accepted < len(row.draft_ids)
            self.seen["after release"] += any(row.terms is not None and row.token_index > 0 for row in work.rows)

    def _ropes_of(self, work: Decode) -> set[Rope]:
        """Includes ropes that the message omits because ranks have cached them."""
        for row in work.rows:
            if row.path:
                self._ropes[row.sequence] = row.rope
        return {self._ropes[row.sequence] for row in work.rows}

    def _check_pending(self) -> None:
        while self._pending:
            self._check()

    def _check(self) -> None:
        """The steps end in order, with the same results in both fleets."""
        pending, wanted = self._pending.pop(0)
        found, *others = (one.result() for one in pending)
        assert found is not None
        assert replace(found, merge_bytes=wanted.merge_bytes) == wanted  # merges in a replay are not counted
        assert not any(others)

    def _commit(self) -> None:
        plan, wanted = self._under_way.pop(0)
        if len(self._pending) > len(self._under_way):
            self._check()
        self.bench.commit(plan, wanted if self._drafts else None)
