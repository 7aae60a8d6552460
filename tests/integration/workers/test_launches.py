"""How much the steps of a rank ask of an accelerator, counted on a pretended one.

Launches of ours are those between queries, keys and values that come out of a layer's projections and the answer that
goes back into it: storing keys, attention, merging. Those of transformers are counted apart.
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from longleaf.attention import Partial
from longleaf.channel.step import Prefill
from longleaf.kernels.dense import Dense
from tests.support.accelerator.events import Log
from tests.support.accelerator.launcher import CountingLauncher
from tests.support.accelerator.ranks import MakeBackend, PretendedRank, dense
from zoo.checkpoints import make_checkpoint

BACKEND = "dense"
"""The kernels that are held to the limits, by their name below."""
DECODE_LAUNCHES, PREFILL_LAUNCHES = 12, 24
"""Launches of ours per layer, however long the context, and whoever shares it."""
CHUNK = 512
NUM_LAYERS = defaultdict(lambda: 2, {"llama4": 4})
"""As few as there are kinds of them."""


class Lone(Dense):
    """One launch, whatever is read: what a kernel for all reads comes to. The rest is torch's operations."""

    name = "lone"

    def __init__(self, launcher: CountingLauncher) -> None:
        self.launcher = launcher

    def attend(self, q_THD, k_KSD, v_KSV, reads, scale, softcap=None):
        return self._attend(q_THD, v_KSV.shape[2], k_KSD, v_KSV)

    def attend_int8(self, q_THD, kept, reads, scale, softcap=None):
        return self._attend(q_THD, q_THD.shape[2], *kept[:4])

    def _attend(self, q_THD, value_dim, *kept):
        out_THV = q_THD.new_empty(*q_THD.shape[:2], value_dim, dtype=torch.float32)
        partial = Partial(out_THV, out_THV.new_empty(q_THD.shape[:2]))
        self.launcher(Lone, (len(q_THD),), q_THD, *kept, partial.out_THD, partial.lse_TH)
        return partial


BACKENDS: dict[str, MakeBackend] = {"dense": dense, "lone": Lone}

limited = pytest.mark.xfail(
    BACKEND == "dense",
    reason="dense launches some twenty operations for each tile of keys: it is right everywhere, and no kernel",
    raises=AssertionError,
    strict=True,
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = make_checkpoint(tmp_path_factory.mktemp(family), family, num_layers=NUM_LAYERS[family])
        return folders[family]

    return get


class Case(NamedTuple):
    """A context that is there, and prompts of so many tokens over it (`book`) or over nothing."""

    family: str = "llama"
    past: int = 1000
    prompts: tuple[tuple[int, str | None], ...] = ((5, "book"),)
    world_size: int = 1
    settings: tuple[tuple[str, object], ...] = ()


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


def rank_of(case: Case, folder_of: Callable[[str], Path], backend: str) -> PretendedRank:
    settings = {"dtype": "bfloat16", "chunk_size": CHUNK, **dict(case.settings)}
    made = PretendedRank(folder_of(case.family), case.world_size, BACKENDS[backend], **settings)
    if case.past:
        made.read(case.past)
    return made


def decoded(case: Case, folder_of: Callable[[str], Path], backend: str = BACKEND) -> Log:
    """A decode step with a row of each prompt. What comes before it is done with fewer launches."""
    made = rank_of(case, folder_of, backend)
    for count, context in case.prompts:
        made.bench.ask(count, 8, context)
    measured, made.rank.backend = made.rank.backend, Lone(made.accelerator.launcher)
    steps = made.steps(computes_chunks=False)
    while next(steps).plan.num_tokens != len(case.prompts):
        pass
    made.rank.backend = measured
    return next(steps).log


def prefilled(case: Case, folder_of: Callable[[str], Path], backend: str = BACKEND) -> Log:
    """A chunk that is read after what is there."""
    made = rank_of(case, folder_of, backend)
    made.bench.ask(2 * CHUNK, 1, "book" if case.past else None)
    return next(step.log for step in made.steps() if isinstance(step.plan.work, Prefill))


def check_limit(log: Log, most: int) -> None:
    counts = log.per_layer("launch")
    assert counts, "no layer launched anything"
    assert max(counts.values()) <= most, f"launches per layer: {dict(counts)}\n{log.told('launch')}"


@limited
@pytest.mark.parametrize("mix", MIXES)
def test_decode_launches_few_kernels_per_layer(mix, folder_of):
    check_limit(decoded(MIXES[mix], folder_of), DECODE_LAUNCHES)


@limited
@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_launches_few_kernels_per_layer(chunk, folder_of):
    check_limit(prefilled(CHUNKS[chunk], folder_of), PREFILL_LAUNCHES)


@pytest.mark.slow
@limited
def test_decode_over_131072_keys_launches_no_more(folder_of):
    check_limit(decoded(Case(past=131_072, prompts=SHARED), folder_of), DECODE_LAUNCHES)


@pytest.mark.parametrize("mix", ["shared and own", "windows", "latents", "20,000 keys"])
def test_with_one_launch_for_all_reads_the_limit_is_kept(mix, folder_of):
    check_limit(decoded(MIXES[mix], folder_of, "lone"), DECODE_LAUNCHES)


def test_a_loop_of_launches_is_found(folder_of, monkeypatch):
    """As a kernel for each tail would be, in an operation of our own."""

    class Looping(Lone):
        def attend(self, q_THD, k_KSD, v_KSV, reads, scale, softcap=None):
            @torch.library.custom_op("longleaf_tests::launch_each", mutates_args={"out"})
            def launch_each(out: torch.Tensor, num_times: int) -> None:
                for _ in range(num_times):
                    self.launcher(Looping, (1,), out)

            partial = super().attend(q_THD, k_KSD, v_KSV, reads, scale, softcap)
            launch_each(partial.out_THD, len(reads))
            return partial

    monkeypatch.setitem(BACKENDS, "looping", Looping)
    check_limit(decoded(Case(prompts=SHARED), folder_of, "looping"), DECODE_LAUNCHES)
    with pytest.raises(AssertionError, match="Looping at tests/integration/workers/test_launches.py"):
        check_limit(decoded(MIXES["16 tails"], folder_of, "looping"), DECODE_LAUNCHES)


def test_a_wait_for_the_device_is_found_where_it_is(folder_of, monkeypatch):
    class Waiting(Lone):
        def attend(self, *args):
            partial = super().attend(*args)
            assert partial.lse_TH.sum() != 0
            return partial

    monkeypatch.setitem(BACKENDS, "waiting", Waiting)
    log = decoded(Case(), folder_of, "waiting")
    line = inspect.getsourcelines(Waiting.attend)[1] + 2
    assert log.per_layer("wait") == {0: 1, 1: 1}
    assert log.by_site("wait")[f"tests/integration/workers/test_launches.py:{line}"] == 2


def by_file(log: Log, *kinds) -> Counter[tuple[str, str]]:
    """How often each file asked for such, by the name of what it asked for."""
    return Counter((event.site.rpartition(":")[0], event.name) for event in log.of(*kinds))


@pytest.mark.parametrize(("past", "prompts"), [(1000, ((5, "book"),)), (5000, SHARED * 4)])
def test_a_decode_step_copies_and_waits_as_often_whatever_its_rows(past, prompts, folder_of):
    """Today: ids, positions and slots go there, which rows are sampled, and what was sampled; back come the highest
    logits, the ids of rank 0, and those that all ranks agreed on. No layer waits."""
    log = decoded(Case(past=past, prompts=prompts), folder_of, "dense")
    there = {("workers/step/inputs.py", "copy"): 3, ("workers/rank.py", "copy"): 2}
    back = {("workers/rank.py", "copy"): 2, ("workers/sampling/sampler.py", "copy"): 1}
    assert by_file(log, "to device") == there
    assert by_file(log, "to host") == back
    assert len(log.of("wait")) == 8
    assert not log.per_layer("wait", "to device", "to host")


def test_a_chunk_copies_its_inputs_and_waits_once_for_its_end(folder_of):
    """And then for whether its keys are finite, which is there by then."""
    log = prefilled(Case(), folder_of, "dense")
    assert by_file(log, "to device") == {("workers/step/inputs.py", "copy"): 3}
    waits = {("workers/rank.py", "synchronize"): 1, ("workers/rank.py", "_local_scalar_dense"): 1}
    assert by_file(log, "wait") == {("workers/step/inputs.py", "to device"): 3} | waits


def test_int8_waits_in_every_layer_to_count_its_blocks(folder_of):
    """Today: the blocks that are written to, in two waits, and those that must grow."""
    assert decoded(Case(settings=INT8), folder_of, "lone").per_layer("wait") == {0: 3, 1: 3}


def test_the_launches_of_dense_grow_with_the_keys(folder_of):
    """The same for each tile of 1024 keys, and in each layer; the model's own do not grow."""
    logs = [decoded(Case(past=past), folder_of, "dense") for past in (1024, 2048, 4096)]
    counts = [set(log.per_layer("launch").values()) for log in logs]
    (one,), (two,), (four,) = counts
    assert four - two == 2 * (two - one) > 2 * 20
    assert len({len(log.outside("launch")) for log in logs}) == 1


@pytest.mark.parametrize(("merge", "num_moves"), [("gather", 1), ("exchange", 2), ("butterfly", 2)])
def test_a_merge_exchanges_once_for_each_of_its_moves(merge, num_moves, folder_of):
    log = decoded(MIXES[f"4 ranks, {merge}"], folder_of, "lone")
    assert log.per_layer("exchange") == {0: num_moves, 1: num_moves}
