"""Decode steps of a small random model: captured ones against those that are launched one by one, steps that begin
before the last one's tokens are known, and ranks that share the device.

Without a GPU graphs are recorded ones, with the same steps over the same kernels.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu import ground
from bench.gpu.cases import Share
from tests.gpu.place import Place, assert_same_bits

if TYPE_CHECKING:
    from bench.gpu.ranks import NotedGraphs
    from longleaf.rank_protocol.step import StepPlan, StepResult
    from workers.rank import Rank

BLOCK_SIZE, MAX_SEQUENCES = 32, 4
STEADY_STEPS = 4


class Watched(NamedTuple):
    """A rank, its logits and its graphs."""

    rank: "Rank"
    logits: list[Tensor]
    """Of a step the newest are the first rows."""
    graphs: "NotedGraphs | None"


def captured_steps_have_the_bits_of_eager_ones(place: Place) -> None:
    """Tokens, logprobs, logits and keys, of rows that come and go, greedy and drawn."""
    ground.need(ground.NEEDED_BY_RANKS)
    from longleaf.rank_protocol.step import Decode

    captured, eager = watched(place, is_captured=True), watched(place, is_captured=False)
    num_steps = 0
    for plan in work(place):
        assert captured.rank.execute(plan) == eager.rank.execute(plan)
        num_rows = len(plan.work.rows) if isinstance(plan.work, Decode) else 0
        num_steps += num_rows > 0
        assert_same_bits(captured.logits[0][:num_rows], eager.logits[0][:num_rows])
    keys, others = slots_of(captured.rank), slots_of(eager.rank)
    for layer in keys:
        assert_same_bits(keys[layer], others[layer])
    graphs = captured.graphs
    assert graphs is not None and graphs.num_captured and not graphs.refusal, graphs and graphs.refusal
    assert graphs.num_replayed == 3 * num_steps, (
        "a step is a replay of the model, one of sampling and one of the broadcast"
    )
    assert eager.graphs is None


def steps_one_behind_say_the_same(place: Place) -> None:
    """A step that begins before the tokens of the last one are known finds them on the device."""
    ground.need(ground.NEEDED_BY_RANKS)
    one, other = watched(place, is_captured=True), watched(place, is_captured=True)
    in_turns = [one.rank.execute(plan) for plan in work(place)]
    assert in_turns == [*one_behind(other.rank, work(place))]


def steady_steps_do_not_synchronize(place: Place) -> None:
    """Nor do those that are not captured."""
    ground.need(ground.NEEDED_BY_RANKS)
    from bench.gpu import plans

    for is_captured in (True, False):
        rank = watched(place, is_captured=is_captured).rank
        steady = plans.over_keys(BLOCK_SIZE + 5, 1, MAX_SEQUENCES, BLOCK_SIZE)
        for _ in range(3):  # the first steps announce the layout and make the first allocations
            rank.execute(next(steady))
        for _ in range(STEADY_STEPS):
            plan = next(steady)
            with place.without_synchronization():
                pending = rank.start(plan)
            assert len(pending.result().tokens) == MAX_SEQUENCES


def ranks_that_share_a_device_say_what_one_does(place: Place) -> None:
    """Two processes, which on a GPU meet over gloo."""
    ground.need(ground.NEEDED_BY_RANKS)
    from bench.gpu import ranks, sharing

    found = sharing.measure(Share(2, 3, place.num_prompt, 24), place.device, ranks.SMALL)
    assert found["is_same"], "two ranks say something else than one"
    assert found["transport"] == "gloo" or not place.is_gpu


def work(place: Place) -> "Iterator[StepPlan]":
    """Rows of all kinds that come and go."""
    from bench.gpu.plans import Asked, answers
    from longleaf.sampling import SamplingParams

    ids = tuple(3 + i * 7 % 400 for i in range(place.num_prompt))
    drawn = SamplingParams(temperature=0.9, top_p=0.9, num_logprobs=3, seed=1)
    adjusted = SamplingParams(temperature=0.7, min_p=0.05, logit_bias={5: 1.0}, seed=2)
    requested = [
        Asked(ids, 6, 0, SamplingParams(num_logprobs=5)),
        Asked(ids[:5], 2, 0),
        Asked(ids[:9], 4, 1, drawn),
        Asked(ids[3:20], 3, 3, adjusted),
        Asked(ids[:2], 1, 4),
        Asked(ids[1:8], 2, 7),
    ]
    return answers(requested, 1, BLOCK_SIZE)


def one_behind(rank: "Rank", work: "Iterable[StepPlan]") -> "Iterator[StepResult | None]":
    """The results of a rank that begins a step before the result of the last one, where the plan permits."""
    pending: Any = None
    for plan in work:
        if pending and not plan.may_overlap:
            yield pending.result()
            pending = None
        following = rank.start(plan)
        if pending:
            yield pending.result()
        pending = following
    yield pending.result()


def watched(place: Place, *, is_captured: bool) -> Watched:
    """A rank with the kernels of the place and a model of two layers in float32, always the same one. All of its keys
    are zero."""
    from bench.gpu import plans
    from bench.gpu.ranks import Shape, make_module, make_rank, noted, served
    from longleaf.config import EngineConfig
    from longleaf.rank_protocol.group_messages import Join

    shape = Shape(2, hidden=128, num_heads=4, num_kv_heads=2, dim=64, ffn=256, vocabulary=512, spread=0.2)
    config = EngineConfig(
        model="random",
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_bytes=8 << 20,
        max_sequences=MAX_SEQUENCES,
        device="cuda" if place.is_gpu else "cpu",
        cuda_graphs="auto" if is_captured else "off",
    )
    rank = make_rank(config)
    rank.allocate_pool(served(make_module(shape, torch.float32, place.device), place.device))
    rank.backend = place.kernels
    if not place.is_gpu:
        as_on_a_gpu(rank, place, is_captured=is_captured)
    logits = watch(rank, place)
    graphs = noted(rank)
    rank.join(Join(plans.EPOCH, 0, "", 0, ("here",)))
    for layer in rank.pool.keys:
        rank.pool.keys[layer].zero_()
        rank.pool.values[layer].zero_()
    return Watched(rank, logits, graphs)


def as_on_a_gpu(rank: "Rank", place: Place, *, is_captured: bool) -> None:
    """Makes a rank on a CPU use the paths of a GPU: tensors at fixed addresses, and recorded graphs."""
    from longleaf.kernels.gpu.launch import launch
    from tests.support.fakes.cuda_graphs import RecordedGraphs
    from workers.step.last_tokens import DeviceIds

    rank.last_ids = DeviceIds(MAX_SEQUENCES, place.device)
    if is_captured:
        rank.graphs = recorded = RecordedGraphs()
        rank.backend = place.launching(recorded.launcher(launch))


def watch(rank: "Rank", place: Place) -> list[Tensor]:
    """Puts a sampler into the rank that chooses as its own. Gives where the logits lie that it chooses from: the widest
    that it ever saw."""
    from workers.sampling.device_sampler import DeviceSampler

    found: list[Tensor] = [torch.empty(0)]

    class Watching(DeviceSampler):
        def choose(self, logits_RV: Tensor, parameters: Any, needs: Any, drafts: Any = None) -> Tensor:
            if len(logits_RV) >= len(found[0]):
                found[0] = logits_RV
            return super().choose(logits_RV, parameters, needs, drafts)

    rank.sampler = Watching(place.device, MAX_SEQUENCES)
    return found


def slots_of(rank: "Rank") -> dict[tuple[int, str], Tensor]:
    """Keys and values of all slots except the trash slots."""
    kinds = {"keys": rank.pool.keys, "values": rank.pool.values}
    return {(layer, kind): pools[layer][:, : rank.pool.trash_slot] for kind, pools in kinds.items() for layer in pools}
