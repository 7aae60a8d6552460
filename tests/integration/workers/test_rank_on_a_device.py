"""The device of a rank's tensors, and the loading of its weights, on a simulated accelerator that is not the first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from longleaf.comm.staged import StagedComm
from longleaf.config import loading_environment, rank_environment
from longleaf.errors import ModelRefused, StartError
from longleaf.rank_protocol.step import Decode, Row, Spans, StepPlan
from longleaf.sampling import SamplingParams
from tests.support.accelerator.device import Accelerator
from tests.support.accelerator.dispatch import DEVICE
from tests.support.accelerator.driver import FREE
from tests.support.accelerator.ranks import PretendedComm, PretendedRank
from workers.model import model as models
from workers.model.weights import loading_to_device
from zoo import families as zoo
from zoo.checkpoints import make_checkpoint

FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen2.5")
"""Windows, sinks, latents in swapped layers, and tied weights."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, num_layers=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=2)


SETTINGS = ({}, {"window_keys": "replicated"}, {"kv_dtype": "int8"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        pytest.param(family, settings, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, family in enumerate(FAMILIES)
        for j, settings in enumerate(SETTINGS)
    ],
    indirect=["folder"],
)
def test_all_tensors_of_a_rank_are_on_its_device(folder, settings):
    if folder.name.startswith("deepseek") and "kv_dtype" in settings:
        with pytest.raises(ModelRefused, match="int8"):  # latents are not rounded
            PretendedRank(folder, dtype="bfloat16", **settings)
        return
    made = PretendedRank(folder, dtype="bfloat16", chunk_size=256, **settings)
    made.bench.ask(300, 3, None)
    made.bench.ask(20, 3, None)
    logs = [made.loading, *(step.log for step in made.steps())]
    assert len(logs) > 4
    assert {event.name for log in logs for event in log.of("allocation")} == {DEVICE}
    module, pool = made.rank.model.module, made.rank.pool
    resident = [*module.parameters(), *module.buffers(), *tensors_of(pool)]
    assert len(resident) > 10
    assert {str(tensor.device) for tensor in resident} == {DEVICE}
    assert {call[1] for call in made.accelerator.driver.calls} == {DEVICE}


def tensors_of(owner: object, depth: int = 4) -> list[Tensor]:
    """Tensors reachable from an object."""
    if isinstance(owner, Tensor) or not depth:
        return [owner] if isinstance(owner, Tensor) else []
    inside = owner.values() if isinstance(owner, dict) else owner if isinstance(owner, list) else vars(owner).values()
    found = (item for item in inside if isinstance(item, Tensor | dict | list) or hasattr(item, "__dict__"))
    return [tensor for item in found if not isinstance(item, type) for tensor in tensors_of(item, depth - 1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rank", [0, 1])
def test_drafts_are_verified_on_the_device_with_one_wait_at_the_end(tmp_path, rank, settings):
    """The simulated device has no values: the ids that it reports are zeros, as the drafts are."""
    folder = make_checkpoint(tmp_path, "gemma3", num_layers=2)
    made = PretendedRank(folder, 2, dtype="bfloat16", rank=rank, **settings)
    made.bench.ask(5, 3, None, sampling=SamplingParams(temperature=1.0, presence_penalty=0.5, num_logprobs=2))
    first = next(made.steps()).plan.work.rows[0]
    [run] = first.runs
    drafted = Row(first.sequence, (), run.end, (), (replace(run, end=run.end + 4),), 1, draft_ids=(0, 0, 0))
    windows = [replace(one, end=one.end + 4, blocks=()) for one in first.window_runs]
    with made.accelerator.running():
        made.rank.execute(StepPlan(1, 9, Decode((replace(drafted, window_runs=tuple(windows)),))))
        log = made.accelerator.log.take()
    assert {event.name for event in log.of("allocation")} == {DEVICE}
    waits = [wait for wait in log.of("wait") if not wait.site.startswith("longleaf/kernels/int8.py")]
    # for tokens or attribution; 8-bit quantization in torch operations takes waits
    assert len(waits) == 1, log.summary("wait")
    ends = {one.end for one in made.rank.epoch._block_table.resident_extents(first.path[-1], 0, 100, run.rank)}
    assert ends == {run.end + 4}


def test_device_is_selected_before_it_is_queried(llama):
    calls = PretendedRank(llama, kv_bytes=None).accelerator.driver.calls
    assert calls[0] == ("set_device", DEVICE)
    assert ("mem_get_info", DEVICE) in calls


@pytest.mark.sampled(2)
def test_weights_are_moved_one_by_one_and_once(folder):
    """Only a few buffers remain to be moved with the model."""
    log = PretendedRank(folder, dtype="bfloat16").loading
    copies = [event for event in log.of("to device") if event.site.startswith("workers/model/")]
    parameters = [event for event in copies if event.site.startswith("workers/model/weights.py")]
    loaded = models.load(str(folder), "bfloat16", "cpu").module
    assert sorted(event.num_bytes for event in parameters) == sorted(p.nbytes for p in loaded.parameters())
    rest = sum(event.num_bytes for event in copies) - sum(event.num_bytes for event in parameters)
    assert rest < sum(event.num_bytes for event in parameters) / 20


def test_tied_weights_stay_tied_on_the_device(tmp_path):
    made = PretendedRank(make_checkpoint(tmp_path, "qwen2.5", num_layers=2))
    module = made.rank.model.module
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_moved_weights_equal_the_checkpoint(family, tmp_path):
    """The weights are moved to the CPU under another device name, so that they have values: none is initialised again,
    and tied weights stay tied."""
    folder = str(make_checkpoint(tmp_path, family))
    plain = models.load(folder, "float32", "cpu").module
    with loading_to_device("cpu:0"):
        moved = models.load(folder, "float32", "cpu").module
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (moved, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not any(parameter.requires_grad for parameter in moved.parameters())


def test_weights_are_not_read_ahead(llama, monkeypatch):
    """Threads that read weights ahead would fill the host's memory with weights that wait for their turn. A value that
    transformers cached for an earlier rank of this process does not count."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a thread reads weights")

    monkeypatch.setattr("transformers.core_model_loading.ThreadPoolExecutor", refuse)
    for name, value in {**rank_environment(1), **dict.fromkeys(loading_environment(), "0")}.items():
        monkeypatch.setenv(name, value)  # and unchanged afterwards
    for name in loading_environment():
        monkeypatch.delenv(name)
    PretendedRank(llama, dtype="bfloat16")


def test_pool_uses_the_device_memory_left_by_steps(llama, caplog):
    with caplog.at_level("INFO", logger="longleaf"):
        made = PretendedRank(llama, 4, kv_bytes=None, dtype="bfloat16", chunk_size=4096)
    pool = sum(tensor.nbytes for tensor in tensors_of(made.rank.pool.keys) + tensors_of(made.rank.pool.values))
    assert 0.9 * FREE < pool < FREE - (1 << 30)
    [line] = [text for text in caplog.messages if text.startswith("kv_bytes")]
    assert f"of 70.0 GiB free on {DEVICE}" in line
    assert "for chunks" in line and "for NCCL" in line


def test_pool_larger_than_the_device_is_refused(llama):
    with pytest.raises(StartError, match=f"bytes of memory of {DEVICE}"):
        PretendedRank(llama, kv_bytes=81 << 30)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast", "permute"])
def test_exchanges_of_ranks_that_share_a_device_are_copied_through_the_host(name):
    accelerator = Accelerator()
    with accelerator.running():
        tensor = torch.ones(2, 3, device=DEVICE)
        accelerator.log.take()
        comm = StagedComm(PretendedComm(accelerator.log, 0, 2))
        found = getattr(comm, name)(tensor, *((1, 1) if name == "permute" else ()))
        log = accelerator.log.take()
    assert str(found.device) == DEVICE
    reported = [(event.kind, event.num_bytes) for event in log.of("to host", "exchange", "to device")]
    assert reported == [("to host", tensor.nbytes), ("exchange", found.nbytes), ("to device", found.nbytes)]


MEASURE = """
import json, sys
from contextlib import nullcontext
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from tests.support.accelerator.device import Accelerator
from tests.support.accelerator.dispatch import DEVICE
from workers.model import model

def resident(kind):
    lines = (line.split() for line in open("/proc/self/status"))
    return next(int(words[1]) << 10 for words in lines if words[0] == kind + ":")

folder, first, dtype, device = sys.argv[1:]
device, place = (DEVICE, Accelerator().running()) if device == "pretend" else (device, nullcontext())
with place:
    model.load(first, dtype, device)  # all is imported and warm
    before, most = resident("RssAnon"), 0
    def note(*_):
        global most
        most = max(most, resident("RssAnon"))
    register_module_parameter_registration_hook(note)
    loaded = model.load(folder, dtype, device)
weights = list(loaded.module.parameters())
print(json.dumps([most - before, sum(w.nbytes for w in weights), max(w.nbytes for w in weights)]))
"""
SLACK = 48 << 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(("device", "share"), [("cpu", 1), ("pretend", 0)])
def test_host_memory_holds_at_most_one_weight_beyond_the_resident_ones(family, device, share, tmp_path):
    """400 MiB of float32 served in bfloat16. The file's page cache does not count: all ranks share it. Each of
    Mixtral's stacked expert tensors is assembled from one tensor per expert."""
    sizes = {"num_layers": 8, "hidden": 1024, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 4096}
    folder = make_checkpoint(tmp_path, family, ffn=3072 if family == "llama" else 768, **sizes)
    (tmp_path / "first").mkdir()
    first = make_checkpoint(tmp_path / "first", family)
    command = [sys.executable, "-c", MEASURE, str(folder), str(first), "bfloat16", device]
    output = subprocess.run(command, env=rank_environment(1), check=True, capture_output=True, text=True).stdout
    most, weights, largest = json.loads(output.splitlines()[-1])
    assert weights > 180 << 20
    assert most <= share * weights + 3 * largest + SLACK


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_attribution_is_accumulated_on_the_device_without_a_wait(llama, settings, world_size):
    """The host waits only at the end of the step; in between, only torch's 8-bit quantization waits."""
    made = PretendedRank(llama, world_size, dtype="bfloat16", **settings)
    made.read(1000)
    made.bench.ask(20, 3, "book")
    execute, requested = made.rank.execute, []

    def asking(plan: StepPlan) -> None:
        if isinstance(plan.work, Decode):
            spans = Spans(64, 1, 1020)
            rows = [replace(row, spans=spans, hidden=((10, 90),)) if row.path else row for row in plan.work.rows]
            requested.append(len(rows))
            plan = replace(plan, work=Decode(tuple(rows)))
        execute(plan)

    made.rank.execute = asking
    for step in made.steps():
        assert {event.name for event in step.log.of("allocation")} <= {DEVICE}
        waits = [event for event in step.log.of("wait") if event.site.startswith("workers/")]
        assert all(event.layer is None and event.name == "event" for event in waits), "before the end of the step"
    assert requested
