"""Whole steps with the kernels of GPUs, on the pretended accelerator: how much they launch, and that no layer waits."""

import pytest

from longleaf.kernels.gpu.backend import TritonKernels
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


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("mix", MIXES)
def test_decode_launches_few_kernels_per_layer(mix, folder_of):
    log = decoded(MIXES[mix], folder_of, kernels)
    check_limit(log, DECODE_LAUNCHES)
    assert not log.per_layer("wait")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_launches_few_kernels_per_layer(chunk, folder_of):
    log = prefilled(CHUNKS[chunk], folder_of, kernels)
    check_limit(log, PREFILL_LAUNCHES)
    assert not log.per_layer("wait")


@pytest.mark.slow
def test_decode_over_131072_keys_launches_no_more(folder_of):
    check_limit(decoded(Case(past=131_072, prompts=SHARED), folder_of, kernels), DECODE_LAUNCHES)
