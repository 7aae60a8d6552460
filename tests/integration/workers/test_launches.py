"""Accelerator operations of a rank's steps, counted on a simulated device. The GPU kernels are checked against the same
limits in tests/triton."""

import inspect
from collections import Counter

import pytest
import torch

from longleaf.sampling import SamplingParams
from tests.support.accelerator.events import Log
from tests.support.accelerator.ranks import dense
from tests.support.accelerator.steps import (
    DECODE_LAUNCHES,
    INT8,
    MIXES,
    SHARED,
    Case,
    FolderOf,
    Lone,
    check_limit,
    checkpoints_in,
    decoded,
    prefilled,
)
from workers.sampling import fixed_shape


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mix", ["shared and own", "windows", "latents", "20,000 keys"])
def test_launch_count_stays_within_its_limit_with_one_launch_for_all_reads(mix, folder_of):
    check_limit(decoded(MIXES[mix], folder_of, Lone), DECODE_LAUNCHES)


def test_loop_of_launches_is_detected(folder_of):
    """Such as one kernel per tail, in a custom operation."""

    class Looping(Lone):
        def attend(self, q_THD, k_KSD, v_KSV, reads, scale, softcap=None):
            @torch.library.custom_op("longleaf_tests::launch_each", mutates_args={"out"})
            def launch_each(out: torch.Tensor, num_times: int) -> None:
                for _ in range(num_times):
                    self.launcher(Looping, (1,), out)

            partial = super().attend(q_THD, k_KSD, v_KSV, reads, scale, softcap)
            launch_each(partial.out_THD, len(reads))
            return partial

    check_limit(decoded(Case(prompts=SHARED), folder_of, Looping), DECODE_LAUNCHES)
    with pytest.raises(AssertionError, match="Looping at tests/integration/workers/test_launches.py"):
        check_limit(decoded(MIXES["16 tails"], folder_of, Looping), DECODE_LAUNCHES)


def test_wait_for_the_device_is_located(folder_of):
    class Waiting(Lone):
        def attend(self, *args):
            partial = super().attend(*args)
            assert partial.lse_TH.sum() != 0
            return partial

    log = decoded(Case(), folder_of, Waiting)
    line = inspect.getsourcelines(Waiting.attend)[1] + 2
    assert log.per_layer("wait") == {0: 1, 1: 1}
    assert log.by_site("wait")[f"tests/integration/workers/test_launches.py:{line}"] == 2


def by_file(log: Log, *kinds) -> Counter[tuple[str, str]]:
    """The number of events of these kinds by file and event name."""
    return Counter((event.site.rpartition(":")[0], event.name) for event in log.of(*kinds))


MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=20),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0}, num_logprobs=0),
)
GREEDY = (SamplingParams(), SamplingParams(num_logprobs=20))
FROM_HERE = {("workers/step/inputs.py", "copy"): 1, ("workers/step/last_tokens.py", "copy"): 1}
"""All inputs, and the positions of the sequences' last ids: steps of fixed shape need one copy in total."""
PARAMETERS = {("workers/sampling/device_sampler.py", "copy"): 1}
REPORT_COPIES = {("workers/sampling/device_sampler.py", "copy"): 1}
"""Tokens, flags of non-finite rows, and logprobs."""


def check_waits(log: Log) -> None:
    """A step waits once, at its end."""
    assert len(log.of("wait")) == 1, f"waits:\n{log.summary('wait')}"
    assert log.events[-1] == log.of("wait")[0]
    assert log.of("wait")[0].name == "event"
    assert len(log.of("to host")) <= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("past", "prompts"), [(1000, ((5, "book"),) * 2), (5000, SHARED * 3)])
@pytest.mark.parametrize(("samplings", "parameters"), [(MIXED, PARAMETERS), (GREEDY, {})])
@pytest.mark.parametrize("world_size", [1, 4])
def test_decode_step_waits_once_for_any_number_of_rows(past, prompts, samplings, parameters, world_size, folder_of):
    """Parameters of greedy rows were copied with the first step."""
    log = decoded(Case(past=past, prompts=prompts, samplings=samplings, world_size=world_size), folder_of, Lone)
    check_waits(log)
    assert by_file(log, "to device") == FROM_HERE | parameters
    assert by_file(log, "to host") == REPORT_COPIES
    assert not log.per_layer("wait", "to device", "to host")


def test_other_ranks_never_receive_the_ids(folder_of):
    log = decoded(Case(prompts=SHARED, samplings=MIXED, world_size=4, rank=3), folder_of, Lone)
    check_waits(log)
    assert by_file(log, "to device") == FROM_HERE
    assert not log.of("to host")


def test_wait_during_sampling_is_detected(folder_of, monkeypatch):
    draw = fixed_shape.draw

    def waiting(scores_RV, *arguments):
        if bool(scores_RV.isfinite().all()):
            return draw(scores_RV, *arguments)
        raise AssertionError("numbers of the device are ones")

    monkeypatch.setattr(fixed_shape, "draw", waiting)
    with pytest.raises(AssertionError, match="waits"):
        check_waits(decoded(Case(prompts=SHARED, samplings=MIXED), folder_of, Lone))


def test_sampling_launch_count_does_not_depend_on_rows(folder_of):
    """Greedy sampling needs few: the highest logit, the finiteness check, the choice of the owner, and the reported
    values."""

    def launches(samplings, prompts):
        found = by_file(decoded(Case(prompts=prompts, samplings=samplings), folder_of, Lone), "launch")
        return sum(count for (file, _), count in found.items() if file.startswith("workers/sampling/"))

    few, many = SHARED, SHARED * 2
    assert launches(MIXED, few) == launches(MIXED, many) < 100
    assert launches((SamplingParams(),), few) == launches((SamplingParams(),), many) < 10


def test_chunk_copies_its_inputs_and_waits_once_at_its_end(folder_of):
    """The wait reads whether its keys are finite, after they are stored."""
    log = prefilled(Case(), folder_of, dense)
    assert by_file(log, "to device") == {("workers/step/inputs.py", "copy"): 1}
    assert by_file(log, "to host") == {("workers/runners/prefill.py", "copy"): 1}
    assert by_file(log, "wait") == {("workers/runners/prefill.py", "event"): 1}
    assert log.events[-1] == log.of("wait")[0]


def test_int8_waits_in_every_layer_to_count_its_blocks(folder_of):
    """Currently: the written blocks, in two waits, and the blocks that must grow."""
    assert decoded(Case(settings=INT8), folder_of, Lone).per_layer("wait") == {0: 3, 1: 3}


def test_dense_launch_count_grows_with_the_keys(folder_of):
    """Per tile of 1024 keys and per layer; the launches of the model do not grow."""
    logs = [decoded(Case(past=past), folder_of, dense) for past in (1024, 2048, 4096)]
    counts = [set(log.per_layer("launch").values()) for log in logs]
    (one,), (two,), (four,) = counts
    assert four - two == 2 * (two - one) > 2 * 20
    assert len({len(log.outside("launch")) for log in logs}) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("merge", "num_moves"), [("gather", 1), ("exchange", 2), ("butterfly", 2)])
def test_merge_exchanges_once_for_each_of_its_rounds(merge, num_moves, folder_of):
    log = decoded(MIXES[f"4 ranks, {merge}"], folder_of, Lone)
    assert log.per_layer("exchange") == {0: num_moves, 1: num_moves}
