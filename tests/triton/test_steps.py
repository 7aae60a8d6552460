"""Whole steps with the kernels of GPUs, on the pretended accelerator: how much they launch, and that no layer waits."""

from collections import Counter

import pytest
import torch

from coordinator.engine_messages import SpanLayout
from longleaf.kernels.gpu import varlen
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.flash import FlashKernels
from longleaf.sampling import SamplingParams
from tests.support.accelerator.launcher import CountingLauncher
from tests.support.accelerator.steps import (
    CHUNKS,
    DECODE_LAUNCHES,
    MIXES,
    PREFILL_LAUNCHES,
    SHARED,
    Case,
    FolderOf,
    check_limit,
    checkpoints_in,
    decoded,
    prefilled,
    rank_of,
)

NUM_MULTIPROCESSORS = 132
"""Of an H200."""


def kernels(launcher: CountingLauncher) -> TritonKernels:
    return TritonKernels(NUM_MULTIPROCESSORS, launcher)


def with_flash(launcher: CountingLauncher) -> FlashKernels:
    return FlashKernels(NUM_MULTIPROCESSORS, varlen.FlashSource(varlen.aten_kernel), launcher)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("mix", MIXES)
def test_decode_launches_few_kernels_per_layer(mix, folder_of):
    log = decoded(MIXES[mix], folder_of, kernels)
    check_limit(log, DECODE_LAUNCHES)
    assert not log.per_layer("wait")


@pytest.mark.parametrize("mix", ["shared and own", "windows", "sinks", "latents", "int8", "4 ranks, exchange"])
def test_attributed_rows_take_one_more_launch_per_layer_and_no_synchronization(mix, folder_of):
    """The memory for attribution is cleared once; the result is copied separately, after the tokens."""
    case = MIXES[mix]._replace(settings=(*MIXES[mix].settings, ("max_draft_tokens", 0)))
    plain, asking = (decoded(case._replace(cuts=cuts), folder_of, kernels) for cuts in (None, SpanLayout(64)))
    adding = {event.layer for event in asking.of("launch") if event.name == "add_shares"}
    before, after = plain.per_layer("launch"), asking.per_layer("launch")
    assert adding and after - before == Counter(adding) + Counter([min(adding)])
    assert not asking.per_layer("wait") and len(asking.of("wait")) == len(asking.of("to host")) == 2
    assert sum(asking.per_layer("to device").values()) <= 3, "tables are brought once per step"


@pytest.mark.parametrize("make", [kernels, with_flash])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_launches_few_kernels_per_layer(chunk, make, folder_of):
    log = prefilled(CHUNKS[chunk], folder_of, make)
    check_limit(log, PREFILL_LAUNCHES)
    assert not log.per_layer("wait")


@pytest.mark.parametrize(
    ("chunk", "count"),
    [("the first chunk", 1), ("a chunk after 1000 keys", 2), ("soft caps", 0), ("latents", 0), ("int8", 0)],
)
def test_flash_kernels_read_what_they_can_of_a_chunk(chunk, count, folder_of):
    names = [event.name for event in prefilled(CHUNKS[chunk], folder_of, with_flash).of("launch") if event.layer == 0]
    assert names.count("_flash_attention_forward") == count
    assert names.count("propagate_nonfinite") == names.count("fold_rounds") == bool(count)
    assert ("attend_items" in names or "attend_items_int8" in names) == (not count)


@pytest.mark.slow
def test_decode_over_131072_keys_launches_no_more(folder_of):
    check_limit(decoded(Case(past=131_072, prompts=SHARED), folder_of, kernels), DECODE_LAUNCHES)


MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=20),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0}, num_logprobs=0),
)


@pytest.mark.parametrize("mix", ["shared", "windows", "replicated windows", "int8", "latents", "4 ranks, exchange"])
@pytest.mark.parametrize("samplings", [MIXED, (SamplingParams(),)], ids=["mixed", "greedy"])
def test_a_captured_step_is_one_copy_each_way_three_replays_and_one_wait(mix, samplings, folder_of):
    """One replay for the model, one for sampling, and one for the broadcast of tokens; no allocation."""
    log = decoded(MIXES[mix]._replace(samplings=samplings, is_captured=True), folder_of, kernels)
    assert [event.name for event in log.of("launch")] == ["graph"] * 3
    assert not log.of("allocation", "exchange")
    assert len(log.of("to device")) == len(log.of("to host")) == 1
    assert log.events[-1] == log.of("wait")[0]
    assert len(log.of("wait")) == 1
    most = (320 if "windows" in mix else 64) << 10
    assert log.of("to device")[0].num_bytes < most, "of the last table only what is used travels"


def test_a_captured_step_of_another_rank_brings_nothing_back(folder_of):
    case = MIXES["4 ranks, exchange"]._replace(samplings=MIXED, is_captured=True, rank=3)
    log = decoded(case, folder_of, kernels)
    assert [event.kind for event in log.events] == ["to device", "launch", "launch", "wait"]


@pytest.mark.parametrize("mix", ["shared", "windows", "latents", "4 ranks, exchange"])
@pytest.mark.parametrize("samplings", [MIXED, (SamplingParams(),)], ids=["mixed", "greedy"])
def test_a_captured_step_with_drafts_asks_for_no_more(mix, samplings, folder_of):
    """Which of them are accepted is found out on the device."""
    case = MIXES[mix]._replace(samplings=samplings, is_captured=True, prompts=SHARED, num_drafts=3)
    log = decoded(case, folder_of, kernels)
    assert [event.kind for event in log.events] == ["to device", "launch", "launch", "to host", "launch", "wait"]


def test_with_8_bit_keys_blocks_are_saved_before_and_restored_after_a_replay(folder_of):
    """Separate launches in each layer, and copies of the tables; no additional wait."""
    log = decoded(MIXES["int8"]._replace(is_captured=True, prompts=SHARED, num_drafts=3), folder_of, kernels)
    assert [event.name for event in log.of("launch")].count("graph") == 3
    assert len(log.of("wait")) == len(log.of("to host")) == 1
    assert len(log.of("to device")) <= 5


def test_another_rank_receives_the_accepted_drafts_and_waits_once(folder_of):
    case = MIXES["4 ranks, exchange"]._replace(samplings=MIXED, is_captured=True, rank=3, num_drafts=3)
    log = decoded(case, folder_of, kernels)
    assert [event.kind for event in log.events] == ["to device", "launch", "launch", "to host", "wait"]
    assert log.of("to host")[0].num_bytes == 16 * torch.long.itemsize


@pytest.mark.parametrize("samplings", [MIXED, (SamplingParams(),)], ids=["mixed", "greedy"])
@pytest.mark.parametrize("rank", [0, 3])
def test_drafts_of_a_step_that_is_not_captured_are_waited_for_once(samplings, rank, folder_of):
    case = MIXES["4 ranks, exchange"]._replace(samplings=samplings, rank=rank, num_drafts=3)
    log = decoded(case._replace(settings=(*case.settings, ("max_sequences", 4))), folder_of, kernels)
    assert [len(log.of(kind)) for kind in ("to host", "wait")] == [1, 1]


@pytest.mark.parametrize("samplings", [MIXED, (SamplingParams(),)], ids=["mixed", "greedy"])
def test_a_step_that_is_not_captured_copies_and_waits_as_little(samplings, folder_of):
    log = decoded(MIXES["shared and own"]._replace(samplings=samplings), folder_of, kernels)
    assert [len(log.of(kind)) for kind in ("to device", "to host", "wait")] == [1, 1, 1]


def test_a_step_of_too_many_rows_is_launched_as_it_comes(folder_of):
    """Its inputs, its table and where its last ids lie are copied one by one, and parameters where rows draw."""
    case = MIXES["shared"]._replace(samplings=MIXED, is_captured=True, settings=(("max_sequences", 4),))
    log = decoded(case._replace(prompts=SHARED), folder_of, kernels)
    assert {event.name for event in log.of("launch")} == {"graph"}
    made = rank_of(case, folder_of, kernels)
    made.bench.ask(40, 3, "book")
    first = next(made.steps(computes_chunks=False))
    assert first.plan.num_tokens == 40
    assert "graph" not in {event.name for event in first.log.of("launch")}
    assert len(first.log.of("wait")) == 1


def test_memory_of_the_host_is_filled_again_when_what_was_sent_from_it_has_arrived(folder_of):
    """This includes the warm-up of each step size before the first request: each of the five begins with a copy."""
    events = rank_of(MIXES["shared"], folder_of, kernels).loading.events
    last = [i for i, event in enumerate(events) if event.kind == "to device"][-5:]
    ends = [*last[1:], len(events)]
    for start, end in zip(last, ends, strict=True):
        assert "wait" in [event.kind for event in events[start:end]]
