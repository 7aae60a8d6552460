"""Whole steps with the kernels of GPUs, on the pretended accelerator: how much they launch, and that no layer waits."""

import pytest

from longleaf.kernels.gpu import varlen
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.flash import FlashKernels
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
)

NUM_MULTIPROCESSORS = 132
"""Of an H200."""


def kernels(launcher: CountingLauncher) -> TritonKernels:
    return TritonKernels(NUM_MULTIPROCESSORS, launcher)


def with_flash(launcher: CountingLauncher) -> FlashKernels:
    return FlashKernels(NUM_MULTIPROCESSORS, varlen.aten, launcher)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("mix", MIXES)
def test_decode_launches_few_kernels_per_layer(mix, folder_of):
    log = decoded(MIXES[mix], folder_of, kernels)
    check_limit(log, DECODE_LAUNCHES)
    assert not log.per_layer("wait")


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
    assert names.count("betray_keys") == names.count("fold_rounds") == bool(count)
    assert ("attend_items" in names or "attend_items_int8" in names) == (not count)


@pytest.mark.slow
def test_decode_over_131072_keys_launches_no_more(folder_of):
    check_limit(decoded(Case(past=131_072, prompts=SHARED), folder_of, kernels), DECODE_LAUNCHES)
