"""The GPU benchmarks of whole models, sampling and shared devices, with small sizes on the CPU."""

import os
import subprocess
import sys
import weakref
from collections import Counter
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from transformers import DynamicCache

from bench.gpu import __main__ as command
from bench.gpu import cases, choosing, counting, ground, plans, sharing, steps, timing
from bench.gpu.cases import KINDS, Attend, Choose, Share, Step, label
from bench.gpu.counting import Counts, counted, tally
from bench.gpu.ground import LeftOut
from bench.gpu.plain import Plain
from bench.gpu.ranks import LLAMA_8B, SMALL, NotedGraphs, make_module, make_rank, served
from bench.gpu.table import page
from longleaf.config import EngineConfig
from longleaf.kernels.dense import DenseBackend
from longleaf.rank_protocol.group_messages import Join
from longleaf.rank_protocol.step import Decode, Prefill
from workers.cuda_graphs.graphs import CaptureRefused

pytestmark = pytest.mark.extended

TINY = SMALL._replace(num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, dim=16, ffn=96)
NUM_KEYS = 300
MACHINE = {"device": "a GPU", "multiprocessors": 1, "nvidia_smi": {}, "versions": {}, "date": "2026-11-22"}


def rank_over(case, **settings):
    """A rank whose keys are random, and the plans of its steps."""
    blocks = plans.num_blocks(case.num_keys, case.num_contexts, case.num_rows, 200, 128)
    config = EngineConfig(
        model="random", kv_bytes=blocks * 128 * TINY.num_stored * 4, device="cpu", dtype="float32", **settings
    )
    rank = make_rank(config)
    rank.allocate_pool(served(make_module(TINY, torch.float32, "cpu"), "cpu"))
    rank.join(Join(plans.EPOCH, 0, "", 0, ("here",)))
    assert rank.pool.num_blocks == blocks
    steps.fill(rank)
    return rank, plans.over_keys(case.num_keys, case.num_contexts, case.num_rows, 128)


@pytest.mark.parametrize("case", [Step(NUM_KEYS), Step(NUM_KEYS, 3), Step(NUM_KEYS, 3, is_shared=False)])
def test_steps_read_the_filled_keys_and_their_tails(case):
    """Includes tails that continue in a second block."""
    rank, work = rank_over(case)
    rank.execute(next(work))
    for step, plan in enumerate(islice(work, 140)):
        result = rank.execute(plan)
        assert set(result.tokens) == set(range(case.num_rows))
        num_keys = case.num_contexts * case.num_keys + case.num_rows * (step + 1)
        assert result.kv_bytes_read == num_keys * TINY.num_stored * 4


def test_contexts_and_tails_use_separate_blocks():
    work = plans.over_keys(NUM_KEYS, 2, 4, 128)
    last = {(row.path or row.sequence): row.runs[0].blocks for plan in islice(work, 1) for row in plan.work.rows}
    tails = [{row.sequence: row.runs[0].blocks for row in plan.work.rows} for plan in islice(work, 200)]
    used = Counter(block for blocks in (*last.values(), *tails[-1].values()) for block in blocks)
    assert set(used) == set(range(plans.num_blocks(NUM_KEYS, 2, 4, 200, 128))) and set(used.values()) == {1}
    assert all(tail[i] == last[: len(tail[i])] for tail in tails for i, last in tails[-1].items())


def test_rank_and_transformers_agree_on_the_same_keys():
    rank, work = rank_over(Step(NUM_KEYS))
    rank.execute(next(work))
    module = make_module(TINY, torch.float32, "cpu")
    cache = DynamicCache(config=module.config)
    for layer, keys_KSD in rank.pool.keys.items():
        cache.update(*(t[None, :, :NUM_KEYS].clone() for t in (keys_KSD, rank.pool.values[layer])), layer)
    plain, token = Plain(module, "cpu"), torch.tensor([[3]])
    for plan in islice(work, 12):
        token = plain._step(token, cache)
        assert rank.execute(plan).tokens[0][0].id == int(token)


def test_step_is_measured_eager_captured_and_with_transformers(monkeypatch):
    monkeypatch.setattr(steps, "STEPS", 3)
    measured = steps.Steps("cpu", TINY, "float32")
    rows = [
        {"case": "step", "what": label(case), **measured.measure(case, 1e9)}
        for case in (Step(99), Step(99, 2), Step(99, 2, num_drafts=3))
    ]
    one, two, drafted = rows
    module = make_module(TINY, torch.float32, "cpu")
    read = sum(part.nbytes for part in module.parameters()) - 512 * 64 * 4  # only one row of the embedding is read
    assert one["weight_bytes"] == read and one["key_bytes"] == 99 * TINY.num_stored * 4 == two["key_bytes"]
    share = (one["weight_bytes"] + one["key_bytes"]) / 1e9 / (one["captured_ms"] / 1e3)
    assert one["share"] == pytest.approx(share, rel=0.01)
    assert not one["is_captured"] and one["why_eager"] == "there are no graphs here"
    assert (
        one["transformers"]["way"] in {"sdpa, StaticCache", "sdpa, DynamicCache"} == set(one["transformers"]["others"])
    )
    assert two["transformers"] == drafted["transformers"] == {"reason": "measured with one row only"}
    assert (
        drafted["key_bytes"] == two["key_bytes"]
        and drafted["what"] == "step, 2 rows that share with 3 drafts over 99 keys"
    )
    text = page([{"copy_gb_per_s": 1.0, "machine": MACHINE, **row} for row in rows])
    assert f"| {label(Step(99))} | {one['kernels']} |" in text
    assert f"- {label(Step(99, 2))}: nothing of transformers: measured with one row" in text
    assert ": not captured: there are no graphs here" in text


def test_memory_of_a_step_is_freed_before_the_next_one(monkeypatch):
    """At half a million keys there is no room for two pools."""
    caches: list[weakref.ref] = []
    pools: list[weakref.ref] = []

    def make(config):
        assert not any(pool() for pool in pools) and len(caches) == 2 and not any(cache() for cache in caches)
        rank = make_rank(config)
        allocate_pool = rank.allocate_pool

        def recording_allocate_pool(model):
            allocate_pool(model)
            pools.append(weakref.ref(rank.pool))

        rank.allocate_pool = recording_allocate_pool
        return rank

    class Filling(Plain):
        def _filled(self, *sizes):
            assert not any(cache() for cache in caches)
            made = super()._filled(*sizes)
            caches.append(weakref.ref(made))
            return made

    monkeypatch.setattr(steps, "make_rank", make)
    monkeypatch.setattr(steps, "Plain", Filling)
    monkeypatch.setattr(steps, "STEPS", 2)
    steps.Steps("cpu", TINY, "float32").measure(Step(99), 1e9)
    assert len(pools) == 2 and not any(pool() for pool in pools)


def test_cases_that_do_not_fit_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 << 30, 80 << 30))
    with pytest.raises(LeftOut, match="needs 83 GiB of free memory, and 40 are there"):
        steps.Steps("cuda:0").measure(Step(524288), 1e12)


def test_step_counts_as_captured_only_after_a_replay():
    class Refusing:
        def capture(self, work):
            raise CaptureRefused("not today")

    class Capturing:
        def capture(self, work):
            return work

    graphs = NotedGraphs(Capturing())
    replay = graphs.capture(lambda: None)
    assert steps.why_eager(graphs) == "these steps do not fit into those that were captured"
    for _ in range(steps.STEPS):
        replay()
    assert steps.why_eager(graphs) == ""
    graphs = NotedGraphs(Refusing())
    with pytest.raises(CaptureRefused):
        graphs.capture(lambda: None)
    assert steps.why_eager(graphs) == "not today"


def test_weights_are_counted_before_allocation():
    module = make_module(TINY, torch.float32, "cpu")
    counted = sum(part.numel() for part in module.parameters() if part.dim() > 1)
    assert TINY.num_weights == counted
    assert LLAMA_8B.num_weights == pytest.approx(8.03e9, rel=0.001)


def test_row_without_a_token_is_not_a_measurement():
    rank, work = rank_over(Step(NUM_KEYS))
    rank.pool.values[0].fill_(torch.nan)
    with pytest.raises(RuntimeError, match="a step of 1 rows gave"):
        steps.times(rank, work, 1)


def test_unsupported_transformers_modes_are_reported(monkeypatch):
    monkeypatch.setattr(
        "bench.gpu.plain.ways", lambda: [("flash_attention_2", "DynamicCache"), ("sdpa", "StaticCache")]
    )
    plain = Plain(make_module(TINY, torch.float32, "cpu"), "cpu")
    reported = plain.measure(50, 1, 2)
    assert reported["way"] == "sdpa, StaticCache" and "Error: " in reported["others"]["flash_attention_2, DynamicCache"]
    monkeypatch.setattr("bench.gpu.plain.ways", lambda: [("flash_attention_2", "DynamicCache")])
    assert plain.measure(50, 1, 2)["reason"].startswith("flash_attention_2, DynamicCache: ")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_sampled_with_all_settings(monkeypatch, kind):
    called = []
    monkeypatch.setattr(timing, "captured", lambda calls: lambda: [called.append(call()) for call in calls])
    monkeypatch.setattr(timing, "seconds", lambda call: (call(), 1e-5)[1])
    monkeypatch.setattr(choosing, "REPEATS", 2)
    case = Choose(kind, 9, 300)
    row = choosing.measure(case, "cpu")
    assert len(called) == 1 and len(called[0]) == 9 and row["captured_us"] == 10.0
    text = page([{"copy_gb_per_s": 1.0, "machine": MACHINE, "case": "choose", "what": kind, **row}])
    assert f"| {kind} | 10 | 10 | " in text


def event(name, start, device=DeviceType.CPU):
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=start + 5))


def test_launches_copies_and_waits_are_counted_separately():
    here = [event(counting.RANGE, 10)]
    here[0].time_range.end = 100
    names = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync"]
    names += ["cudaMemsetAsync", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventRecord", "aten::add"]
    here += [event(name, 11 + i) for i, name in enumerate(names)]
    before_and_after = [event("cudaLaunchKernel", 5), event("cudaDeviceSynchronize", 101)]
    there = [event(name, 500, DeviceType.CUDA) for name in ("attend_items", "Memcpy HtoD", "Memset", counting.RANGE)]
    assert tally([*before_and_after, *here, *there]) == Counts(launches=3, graphs=1, copies=2, waits=2, kernels=1)
    assert tally(here[:1]) is None


def test_profiler_without_gpu_events_counts_nothing():
    assert counted(lambda: torch.ones(3) + 1) is None


def test_plans_batch_prompts_that_arrive_and_finish():
    requested = [plans.Asked(tuple(range(3, 12)), 6), plans.Asked((5, 6), 2, 1), plans.Asked((9, 9, 9), 3, 4)]
    work = list(plans.answers(requested, 2, 4))
    assert [plan.step for plan in work] == list(range(len(work)))
    chunks = [plan.work for plan in work if isinstance(plan.work, Prefill)]
    assert [chunk.token_ids for chunk in chunks] == [one.token_ids[:-1] for one in requested]
    assert [(piece.rank, len(piece)) for piece in chunks[0].pieces] == [(0, 4), (1, 4)]
    steps = [plan for plan in work if isinstance(plan.work, Decode)]
    assert [[row.sequence for row in plan.work.rows] for plan in steps] == [
        [0],
        [0, 1],
        [0, 1],
        [0],
        [0, 2],
        [0, 2],
        [2],
    ]
    assert [plan.release_sequences for plan in steps] == [(), (), (), (1,), (), (), (0,)]
    assert [run.rank for plan in steps for row in plan.work.rows[:1] for run in row.runs][:6] == [0, 0, 0, 0, 1, 1]


def test_rank_processes_generate_the_tokens_of_transformers():
    found, transport, _ = sharing.answered(Share(2, 2, 70, 40), 2, "cpu", TINY)
    assert transport == "shared_memory"
    module = make_module(TINY, torch.float32, "cpu")
    for i, tokens in found.tokens.items():
        ids = torch.tensor([[(i * 31 + j * 7) % 512 for j in range(70)]])
        output = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert tokens == output[0, 70:].tolist() and len(set(tokens)) > 5


def test_command_measures_cases_of_all_kinds(monkeypatch, tmp_path, capsys):
    for name, value in {"DEVICE": "cpu", "stand": lambda: None}.items():
        monkeypatch.setattr(ground, name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("bench.gpu.machine.describe", lambda device: MACHINE)
    for name, value in {"captured": lambda calls: lambda: None, "seconds": lambda call: 1e-5}.items():
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(command, "load", lambda: {"triton": DenseBackend()})
    monkeypatch.setattr("bench.gpu.subjects.MAX_SETS", 1)
    monkeypatch.setattr(steps, "Steps", partial(steps.Steps, shape=TINY, dtype="float32"))
    answered = sharing.Answered()
    answered.seconds.append(0.5)
    monkeypatch.setattr(sharing, "answered", lambda *_: (answered, "gloo", "dense"))
    wanted = [Step(60), Choose("greedy", 3, 50), Share(2, 8), Attend("float32", 64), cases.Prefill(0, 40)]
    monkeypatch.setattr(command, "chosen", lambda text: wanted)
    assert command.main(["--json"]) == 0
    printed = tmp_path / "gpu.json"
    printed.write_text(capsys.readouterr().out)
    assert command.main(["--table", str(printed)]) == 0
    text = capsys.readouterr().out
    assert all(f"| {label(case)} | " in text for case in wanted)
    assert f"| {label(wanted[2])} | dense | gloo | 16 | 16 | yes |" in text


def test_failed_rank_reports_the_reason():
    failed = pytest.raises(RuntimeError, match=r"(?s)rank 0 failed.*'str' object")
    with sharing.running(1, "cpu", TINY) as ranks, failed:
        ranks.execute("no plan")


BLOCKED_IMPORTS = """
import sys
from bench.gpu import ground
ground.find_spec = lambda name: None
ground.stand_in()
sys.path.insert(0, sys.path.pop())
import msgspec
assert "stand_ins" in msgspec.__file__, msgspec.__file__
from bench.gpu import choosing, steps
from bench.gpu.cases import Choose, Step
from bench.gpu.ranks import SMALL
assert "zmq" not in sys.modules and "ray" not in sys.modules
steps.STEPS = 2
assert steps.Steps("cpu", SMALL, "float32").measure(Step(99, 2), 1e9)["eager_ms"] > 0
tokens = choosing.Tokens(Choose("all settings mixed", 5, 300), "cpu")
assert all(tokens.start().tokens())
"""


def test_steps_and_tokens_need_neither_msgspec_nor_ray():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORTS], capture_output=True, text=True, env=environment, timeout=120
    )
    assert run.returncode == 0, run.stderr
