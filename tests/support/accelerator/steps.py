"""Steps on the fake accelerator that must stay below a limit of launches, by their reads and by sharing.

Our launches are those between the queries, keys and values of a layer's projections and the answer that returns to the
layer: storing keys, attention, merging. Those of transformers are counted separately.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from bench.gpu.plans import with_drafts
from coordinator.engine_messages import SpanLayout
from longleaf.attention import Partial
from longleaf.kernels.dense import DenseBackend
from longleaf.rank_protocol.step import Decode, Prefill
from longleaf.sampling import SamplingParams
from tests.support.accelerator.events import Log
from tests.support.accelerator.launcher import CountingLauncher
from tests.support.accelerator.ranks import MakeBackend, PretendedRank
from zoo.checkpoints import make_checkpoint
from zoo.families import Family, Hybrid, Refused

DECODE_LAUNCHES, PREFILL_LAUNCHES = 12, 24
"""Our launches per layer, independent of the length of the context and the number of sharers."""
CHUNK = 512
NUM_LAYERS = defaultdict(lambda: 2, {"llama4": 4})
"""As few as there are kinds of them."""
FolderOf = Callable[[Family | Hybrid | Refused], Path]
"""Gives the checkpoint of a family."""


def checkpoints_in(folder: Path) -> FolderOf:
    """Makes the checkpoint of each family that is asked for, once."""
    made: dict[Family | Hybrid | Refused, Path] = {}

    def get(family: Family | Hybrid | Refused) -> Path:
        if family not in made:
            made[family] = make_checkpoint(folder / family, family, num_layers=NUM_LAYERS[family])
        return made[family]

    return get


class Lone(DenseBackend):
    """One launch for any reads: the count of a kernel that handles all reads. The rest is torch's operations."""

    name = "lone"

    def __init__(self, launcher: CountingLauncher) -> None:
        self.launcher = launcher

    def attend(self, q_THD, k_KSD, v_KSV, reads, scale, softcap=None):
        return self._attend(q_THD, v_KSV.shape[2], k_KSD, v_KSV)

    def attend_int8(self, q_THD, layer, reads, scale, softcap=None):
        return self._attend(q_THD, q_THD.shape[2], *layer[:4])

    def _attend(self, q_THD, value_dim, *tensors):
        out_THV = q_THD.new_empty(*q_THD.shape[:2], value_dim, dtype=torch.float32)
        partial = Partial(out_THV, out_THV.new_empty(q_THD.shape[:2]))
        self.launcher(Lone, (len(q_THD),), q_THD, *tensors, partial.out_THD, partial.lse_TH)
        return partial


class Case(NamedTuple):
    """A context that is there, and prompts of so many tokens over it (`book`) or over nothing."""

    family: Family = "llama"
    past: int = 1000
    prompts: tuple[tuple[int, str | None], ...] = ((5, "book"),)
    world_size: int = 1
    settings: tuple[tuple[str, object], ...] = ()
    samplings: tuple[SamplingParams, ...] = (SamplingParams(),)
    """Parameters of the prompts in turn."""
    cuts: SpanLayout | None = None
    """Span layout of the book, for prompts with attribution."""
    rank: int = 0
    is_captured: bool = False
    num_drafts: int = 0
    """Drafts per row of the step."""


SHARED = ((5, "book"), (7, "book"), (9, "book"), (20, "book"))
OWN = ((40, None), (300, None), (5, None), (700, None))
EXCHANGE, GATHER, BUTTERFLY = ((("merge", name),) for name in ("exchange", "gather", "butterfly"))
INT8, REPLICATED = (("kv_dtype", "int8"),), (("window_keys", "replicated"),)
MIXES = {
    "1 key": Case(past=0, prompts=((1, None),)),
    "128 keys": Case(past=120),
    "20,000 keys": Case(past=20_000),
    "shared": Case(prompts=SHARED),
    "own": Case(past=0, prompts=OWN),
    "shared and own": Case(prompts=SHARED + OWN),
    "16 tails": Case(prompts=SHARED * 4),
    "windows": Case("gemma3", prompts=SHARED + OWN),
    "replicated windows": Case("gemma3", prompts=SHARED + OWN, settings=REPLICATED),
    "sections": Case("llama4", prompts=SHARED),
    "soft caps": Case("gemma2", prompts=SHARED),
    "sinks": Case("gpt_oss", prompts=SHARED),
    "latents": Case("deepseek_v3", prompts=SHARED + OWN),
    "int8": Case(prompts=SHARED + OWN, settings=INT8),
    "int8 windows": Case("gemma3", prompts=SHARED, settings=INT8),
    "4 ranks, exchange": Case(prompts=SHARED, world_size=4, settings=EXCHANGE),
    "4 ranks, gather": Case(prompts=SHARED, world_size=4, settings=GATHER),
    "4 ranks, butterfly": Case(prompts=SHARED, world_size=4, settings=BUTTERFLY),
    "4 ranks, latents": Case("deepseek_v3", prompts=SHARED, world_size=4, settings=EXCHANGE),
}
CHUNKS = {
    "the first chunk": Case(past=0),
    "a chunk after 1000 keys": Case(),
    "a chunk after 20,000 keys": Case(past=20_000),
    "windows": Case("gemma3"),
    "replicated windows": Case("gemma3", settings=REPLICATED),
    "sections": Case("llama4"),
    "soft caps": Case("gemma2"),
    "sinks": Case("gpt_oss"),
    "latents": Case("deepseek_v3"),
    "int8": Case(settings=INT8),
    "4 ranks, queries": Case(world_size=4, settings=(("prefill", "queries"), *EXCHANGE)),
    "4 ranks, keys": Case(world_size=4, settings=(("prefill", "keys"), *EXCHANGE)),
}


def rank_of(case: Case, folder_of: FolderOf, make_backend: MakeBackend) -> PretendedRank:
    settings = {"dtype": "bfloat16", "chunk_size": CHUNK, **dict(case.settings)}
    folder = folder_of(case.family)
    made = PretendedRank(folder, case.world_size, make_backend, case.rank, case.is_captured, **settings)
    if case.past:
        made.read(case.past)
    return made


def decoded(case: Case, folder_of: FolderOf, make_backend: MakeBackend) -> Log:
    """A decode step with a row of each prompt. The steps before it use fewer launches."""
    made = rank_of(case, folder_of, make_backend)
    for (count, context), sampling in zip(case.prompts, cycle(case.samplings), strict=False):
        made.bench.ask(count, 8, context, sampling=sampling, cuts=case.cuts if context else None)
    assert made.rank.epoch is not None
    runner = made.rank.epoch._decode._model_runner
    measured, runner.backend = runner.backend, Lone(made.accelerator.launcher)
    steps = made.steps(computes_chunks=False)
    while next(steps).plan.num_tokens != len(case.prompts):
        pass
    runner.backend = measured
    if not case.num_drafts:
        return next(steps).log
    plan = made.bench.schedule()
    assert plan is not None and isinstance(plan.work, Decode)
    rows = tuple(with_drafts(row, (7,) * case.num_drafts) for row in plan.work.rows)
    return made.logged(replace(plan, work=Decode(rows)))


def prefilled(case: Case, folder_of: FolderOf, make_backend: MakeBackend) -> Log:
    """A chunk that is prefilled after the past."""
    made = rank_of(case, folder_of, make_backend)
    made.bench.ask(2 * CHUNK, 1, "book" if case.past else None)
    return next(step.log for step in made.steps() if isinstance(step.plan.work, Prefill))


def check_limit(log: Log, most: int) -> None:
    counts = log.per_layer("launch")
    assert counts, "no layer launched anything"
    assert max(counts.values()) <= most, f"launches per layer: {dict(counts)}\n{log.summary('launch')}"
