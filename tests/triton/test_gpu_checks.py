"""The checks of `make test-gpu`, small, in the interpreter: that they run, and can fail."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

from bench.gpu import ground, ranks, steps
from bench.gpu.cases import Step
from longleaf.attention.partial import Partial
from longleaf.kernels.gpu.backend import TritonKernels
from tests.gpu import __main__ as command
from tests.gpu import decoding
from tests.gpu.checks import CHECKS
from tests.gpu.place import LeftOut, Place
from tests.support.fakes.cuda_graphs import RecordedGraphs
from workers.cuda_graphs.graphs import CaptureRefused
from workers.rank import Rank
from workers.sampling.device_sampler import DeviceSampler

INVALID = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
ON_GPU = {"probes", "far_slots", "many_rows_by_flash_kernels", "no_call_waits", "a_graph_serves_any_mix"}
ON_GPU |= {
    "cudnn_is_right",
    "flash_attn_4_is_right",
    "regular_shapes_agree_with_float64",
    "torchs_own_is_right",
    "torchs_public_one_is_right",
    "flash_attn_is_right",
    "chunks_of_every_dim",
    "chunks_have_the_same_bits_each_time",
}


def small(kernels=None):
    return Place("cpu", kernels or TritonKernels(4), (64,), 300, 4, 70)


@INVALID
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_passes_or_names_its_requirement(check):
    if check.__name__ in ON_GPU:
        with pytest.raises(LeftOut):
            check(small())
    else:
        check(small())


BARE = """
from bench.gpu import ground
ground.stand_in()
import bench.gpu.machine, bench.gpu.subjects, bench.gpu.timing, longleaf.kernels.gpu.flash
from tests.gpu.checks import CHECKS
from tests.gpu.place import LeftOut, Place
from longleaf.kernels.gpu.backend import TritonKernels
assert not ground.missing()
place = Place("cpu", TritonKernels(4), (64,), 90, 3, 40)
checks = {check.__name__: check for check in CHECKS}
checks["folds_to_the_same_bits"](place)
try:
    checks["a_model_answers_as_on_the_cpu"](place)
except LeftOut as reason:
    print(reason)
"""


def test_a_name_that_no_check_has_is_refused(monkeypatch):
    monkeypatch.setattr(ground, "stand", lambda: None)
    with pytest.raises(SystemExit, match="^no check's name holds 'captures'$"):
        command.main(["captures"])


def what_is_installed_with(*names):
    """Files and folders of some distributions and their dependencies."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.match(r"[\w.-]+", waiting.pop())[0].lower()
        with suppress(PackageNotFoundError):  # it is for other systems
            if name not in found:
                parts = distribution(name)
                found[name] = {parts.locate_file(file.parts[0]) for file in parts.files if file.parts[0] != ".."}
                waiting += [each for each in parts.requires or () if "extra ==" not in each]
    return set().union(*found.values())


RANKS = """
from bench.gpu import ground
ground.stand_in()
ground.need(ground.NEEDED_BY_RANKS)
import bench.gpu.choosing, bench.gpu.sharing, bench.gpu.steps, zoo.checkpoints
"""


def run_with(folder, script, *names):
    """Runs a script in an interpreter that has only these distributions and their dependencies."""
    for path in what_is_installed_with(*names):
        (folder / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": f"{os.getcwd()}:{folder}"}
    command = [sys.executable, "-S", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_nothing_is_needed_but_torch_and_triton(tmp_path):
    """And numpy, which Triton's interpreter needs."""
    run = run_with(tmp_path, BARE, "torch", "triton", "numpy")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "needs transformers >= 5.15, safetensors, tokenizers, psutil, blake3\n"


def test_ranks_import_only_available_packages(tmp_path):
    run = run_with(tmp_path, RANKS, *ground.NEEDED, *ground.NEEDED_BY_RANKS)
    assert (run.returncode, run.stderr) == (0, "")


class Wrong(TritonKernels):
    """Kernels that are a little off."""

    def attend(self, *args, **options):
        right = super().attend(*args, **options)
        return Partial(right.out_THD * 1.05, right.lse_TH)

    attend_int8 = attend

    def fold(self, packed_NTHC):
        right = super().fold(packed_NTHC)
        return Partial(right.out_THD, right.lse_TH + 1e-4)

    def pack(self, partial, dtype):
        return super().pack(Partial(partial.out_THD, partial.lse_TH.nextafter(torch.tensor(9.0))), dtype)


@INVALID
@pytest.mark.parametrize("name", ["few_rows", "latents", "many_rows", "folds_to_the_same_bits", "packed_bits"])
def test_a_check_fails_where_kernels_are_wrong(name):
    (check,) = (check for check in CHECKS if check.__name__ == name)
    with pytest.raises(AssertionError):
        check(small(Wrong(4)))


def test_a_check_of_captured_steps_fails_where_a_replay_does_nothing(monkeypatch):
    capture = RecordedGraphs.capture
    monkeypatch.setattr(RecordedGraphs, "capture", lambda graphs, work: capture(graphs, work) and (lambda: None))
    with pytest.raises(AssertionError):
        decoding.captured_steps_have_the_bits_of_eager_ones(small())


@pytest.mark.slow
def test_a_check_of_captured_steps_fails_where_nothing_is_captured(monkeypatch):
    def refuse(graphs, work):
        raise CaptureRefused("not today")

    monkeypatch.setattr(RecordedGraphs, "capture", refuse)
    with pytest.raises(AssertionError, match="not today"):
        decoding.captured_steps_have_the_bits_of_eager_ones(small())


@INVALID
def test_steps_are_measured_with_what_gpus_do_in_them(monkeypatch):
    """The kernels, tensors of fixed address, and graphs, which here are recorded."""
    made = []

    class RankOfGpu(Rank):
        def allocate_pool(self, model):
            super().allocate_pool(model)
            self.backend = TritonKernels(4)
            self.sampler = DeviceSampler("cpu", 2)
            decoding.as_on_a_gpu(self, small(), is_captured=self.config.cuda_graphs == "auto")
            made.append(self)

    monkeypatch.setattr(ranks, "Rank", RankOfGpu)
    monkeypatch.setattr(steps, "STEPS", 2)
    shape = ranks.SMALL._replace(num_layers=1, hidden=64, num_heads=2, num_kv_heads=1, dim=64, ffn=64, vocabulary=64)
    row = steps.Steps("cpu", shape, "float32").measure(Step(200, 2), 1e9)
    assert row["is_captured"] and row["why_eager"] == "" and row["kernels"] == "triton"
    eager, captured = made
    assert eager.graphs is None and captured.graphs.num_replayed >= 2 * (steps.WARM_UP + steps.STEPS)
