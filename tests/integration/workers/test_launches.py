"""How much the steps of a rank ask of an accelerator, counted on a pretended one. The kernels of GPUs are held to its
limits in tests/triton."""

import inspect
from collections import Counter

import pytest
import torch

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


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("mix", ["shared and own", "windows", "latents", "20,000 keys"])
def test_with_one_launch_for_all_reads_the_limit_is_kept(mix, folder_of):
    check_limit(decoded(MIXES[mix], folder_of, Lone), DECODE_LAUNCHES)


def test_a_loop_of_launches_is_found(folder_of):
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

    check_limit(decoded(Case(prompts=SHARED), folder_of, Looping), DECODE_LAUNCHES)
    with pytest.raises(AssertionError, match="Looping at tests/integration/workers/test_launches.py"):
        check_limit(decoded(MIXES["16 tails"], folder_of, Looping), DECODE_LAUNCHES)


def test_a_wait_for_the_device_is_found_where_it_is(folder_of):
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
    """How often each file asked for such, by the name of what it asked for."""
    return Counter((event.site.rpartition(":")[0], event.name) for event in log.of(*kinds))


@pytest.mark.parametrize(("past", "prompts"), [(1000, ((5, "book"),)), (5000, SHARED * 4)])
def test_a_decode_step_copies_and_waits_as_often_whatever_its_rows(past, prompts, folder_of):
    """Today: ids, positions and slots go there, which rows are sampled, and what was sampled; back come the highest
    logits, the ids of rank 0, and those that all ranks agreed on. No layer waits."""
    log = decoded(Case(past=past, prompts=prompts), folder_of, dense)
    there = {("workers/step/inputs.py", "copy"): 3, ("workers/rank.py", "copy"): 2}
    back = {("workers/rank.py", "copy"): 2, ("workers/sampling/sampler.py", "copy"): 1}
    assert by_file(log, "to device") == there
    assert by_file(log, "to host") == back
    assert len(log.of("wait")) == 8
    assert not log.per_layer("wait", "to device", "to host")


def test_a_chunk_copies_its_inputs_and_waits_once_for_its_end(folder_of):
    """And then for whether its keys are finite, which is there by then."""
    log = prefilled(Case(), folder_of, dense)
    assert by_file(log, "to device") == {("workers/step/inputs.py", "copy"): 3}
    waits = {("workers/rank.py", "synchronize"): 1, ("workers/rank.py", "_local_scalar_dense"): 1}
    assert by_file(log, "wait") == {("workers/step/inputs.py", "to device"): 3} | waits


def test_int8_waits_in_every_layer_to_count_its_blocks(folder_of):
    """Today: the blocks that are written to, in two waits, and those that must grow."""
    assert decoded(Case(settings=INT8), folder_of, Lone).per_layer("wait") == {0: 3, 1: 3}


def test_the_launches_of_dense_grow_with_the_keys(folder_of):
    """The same for each tile of 1024 keys, and in each layer; the model's own do not grow."""
    logs = [decoded(Case(past=past), folder_of, dense) for past in (1024, 2048, 4096)]
    counts = [set(log.per_layer("launch").values()) for log in logs]
    (one,), (two,), (four,) = counts
    assert four - two == 2 * (two - one) > 2 * 20
    assert len({len(log.outside("launch")) for log in logs}) == 1


@pytest.mark.parametrize(("merge", "num_moves"), [("gather", 1), ("exchange", 2), ("butterfly", 2)])
def test_a_merge_exchanges_once_for_each_of_its_moves(merge, num_moves, folder_of):
    log = decoded(MIXES[f"4 ranks, {merge}"], folder_of, Lone)
    assert log.per_layer("exchange") == {0: num_moves, 1: num_moves}
