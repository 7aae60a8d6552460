"""GPU benchmarks: checks that need no GPU."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import ground, table, timing
from bench.gpu.cases import CHUNK, KINDS, TARGET_FROM, Attend, Choose, Move, Prefill, Share, Step, cases, label
from bench.gpu.subjects import Subjects, reads_of
from bench.gpu.table import page
from longleaf.kernels.dense import DenseBackend

pytestmark = pytest.mark.extended
MACHINE = {
    "device": "NVIDIA H200",
    "multiprocessors": 132,
    "nvidia_smi": {"clocks.sm": "1980"},
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "flash-attn": None},
    "date": "2026-11-22",
}
NUM_PUBLISHED = 2 + 12
SMALL = [
    Attend("bfloat16", 512),
    Attend("float32", 512, 8),
    Attend("float16", 512, 8, is_shared=False),
    Attend("int8", 512),
    Attend("latent", 64, 2),
    Move("store", 5),
    Move("store_int8", 130),
    Move("pack", 3),
    Move("fold", 3, 4),
    Prefill(0, 40),
    Prefill(64, 40),
]


@pytest.mark.parametrize("module", ["bench.gpu", "bench.gpu.weights", "tests.gpu"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_notice_is_printed_and_the_exit_code_is_0(module):
    run = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "no GPU: nothing was run\n")


def test_missing_packages_are_named_in_one_line(monkeypatch):
    versions = {"torch": "2.11.0+cu130", "triton": "3.6.0"}
    monkeypatch.setattr(ground, "installed", versions.get)
    assert ground.missing() == ""
    versions["torch"] = "2.9.1"
    assert ground.missing() == "missing: torch >= 2.11 (here: 2.9.1)"
    del versions["triton"]
    assert ground.missing() == "missing: torch >= 2.11 (here: 2.9.1), triton >= 3.6"
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert ground.missing().startswith("missing: Python 3.11, torch")


def test_gpu_without_triton_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(ground, "has_gpu", lambda: True)
    monkeypatch.setattr(ground, "installed", {"torch": "2.11.0"}.get)
    assert command.main(["--json"]) == 1
    assert capsys.readouterr().err == "missing: triton >= 3.6\n"


def test_torch_is_reported_when_missing(monkeypatch, capsys):
    monkeypatch.setattr(ground, "installed", lambda name: None)
    assert ground.stand() == 1
    assert capsys.readouterr().err == "missing: torch >= 2.11, triton >= 3.6\n"


BLOCKED_IMPORTS = """
import sys
from bench.gpu import ground
ground.find_spec = lambda name: None
ground.stand_in()
sys.path.insert(0, sys.path.pop())
import msgspec
assert "stand_ins" in msgspec.__file__, msgspec.__file__
import workers.rank
from longleaf.rank_protocol.step import Decode, Row, StepPlan, StepResult
from longleaf.runs import Run
row = Row(0, (0,), 3, (), (Run(0, 0, 4, (1,)),), 0)
assert row == Row(0, (0,), 3, (), (Run(0, 0, 4, (1,)),), 0) and row.num_tokens == 1 and len(row.runs[0]) == 4
assert msgspec.structs.replace(StepPlan(1, 2, Decode((row,))), step=3).step == 3
one, other = StepResult(1, 2, {}), StepResult(1, 2, {})
assert one.comparisons == {} and one.comparisons is not other.comparisons
"""


def test_kernels_and_ranks_do_not_need_msgspec():
    run = subprocess.run([sys.executable, "-c", BLOCKED_IMPORTS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_cases_are_unique_and_targets_come_first():
    found = list(cases())
    assert len({label(case) for case in found}) == len(found)
    assert {case.keys for case in found if isinstance(case, Attend)} == {
        "bfloat16",
        "float16",
        "float32",
        "int8",
        "latent",
    }
    assert [case.target for case in found[:5]] == [None, None, 0.85, 0.85, 0.85]
    assert all(not case.target or case.num_keys >= TARGET_FROM for case in found if isinstance(case, Attend))
    assert {case.past for case in found if isinstance(case, Prefill)} == {0, 32768, 100_000, 131072}


def test_products_bind_the_target_of_many_rows_that_share_keys():
    assert Attend("bfloat16", 131072, 64).target_tflops == 400
    assert Attend("bfloat16", 131072, 64, is_shared=False).target_tflops is None
    assert Attend("bfloat16", 131072, 8).target_tflops is None
    assert [Prefill(past).target_tflops for past in (0, 32768)] == [None, 500]
    row = {"case": "attend", **Attend("bfloat16", 131072, 64)._asdict(), "target": 0.85, "share": 0.5}
    assert table.target(row | {"graph_us": 340.0}) == "400 TFLOP/s, met"
    assert table.target(row | {"graph_us": 350.0}) == "400 TFLOP/s, missed"
    row = {"case": "attend", **Attend("int8", 131072)._asdict(), "target": None, "share": 0.78}
    assert table.target(row) == "88%, missed"


def test_whole_steps_tokens_and_shared_devices_are_measured():
    found = list(cases())
    steps = [case for case in found if isinstance(case, Step)]
    assert [(case.num_keys, case.num_rows, case.num_drafts) for case in steps if case.num_drafts] == [
        (32768, 1, 7),
        (131072, 1, 7),
        (131072, 8, 7),
    ]
    assert [(case.num_keys, case.num_rows, case.num_contexts) for case in steps if not case.num_drafts] == [
        (32768, 1, 1),
        (131072, 1, 1),
        (262144, 1, 1),
        (524288, 1, 1),
        (131072, 8, 1),
        (32768, 8, 8),
    ]
    chosen = [case for case in found if isinstance(case, Choose)]
    assert [case.kind for case in chosen] == list(KINDS)
    assert {(case.num_rows, case.vocabulary) for case in chosen} == {(64, 152_000)}
    assert [case.num_ranks for case in found if isinstance(case, Share)] == [2]


def test_bytes_and_operations_are_the_required_minimum():
    assert Attend("bfloat16", 1000).num_bytes == 2 * 8 * 1000 * 128 * 2
    assert Attend("float32", 1000, 8).num_bytes == 2 * Attend("float16", 1000).num_bytes
    assert Attend("int8", 1280).num_bytes == 8 * (1280 * (2 * 128 + 4) + 10 * 128)
    assert Attend("latent", 1000).num_bytes == 1000 * 576 * 2
    assert Attend("bfloat16", 1000, 64).num_flops == 4 * 32 * 128 * 64 * 1000
    assert Attend("latent", 1000, 2, is_shared=False).num_flops == 2 * 16 * (576 + 512) * 1000
    assert Prefill(0, 3).num_flops == 4 * 32 * 128 * 6  # 1 + 2 + 3 keys are seen
    assert Prefill(100, 1).num_flops == 4 * 32 * 128 * 101
    assert Move("fold", 10, 8).num_bytes == 10 * 32 * 129 * 4 * 9


def test_rows_read_shared_or_separate_keys():
    (shared,) = reads_of(Attend("bfloat16", 800, 8))
    assert shared[:4] == (0, 8, 0, 800)
    own = reads_of(Attend("bfloat16", 800, 8, is_shared=False))
    assert [read[:4] for read in own[:2]] == [(0, 1, 0, 100), (1, 2, 100, 200)] and own.num_keys == 800
    assert len(reads_of(Prefill(0))) == 1 and reads_of(Prefill(64))[1].is_causal and CHUNK > 1


@pytest.mark.parametrize("case", SMALL, ids=label)
def test_case_is_callable(monkeypatch, case):
    monkeypatch.setattr("bench.gpu.subjects.MAX_SETS", 2)
    calls = Subjects(DenseBackend(), "cpu").calls(case)
    assert len(calls) == 2
    found = calls[0]()
    if isinstance(case, (Attend, Prefill)):
        assert found.out_THD.isfinite().all() and len(found.out_THD) == case.num_rows


def test_page_is_rendered_from_recorded_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bench.gpu.subjects.MAX_SETS", 1)
    monkeypatch.setattr(timing, "captured", lambda calls: "graph")
    monkeypatch.setattr(timing, "seconds", lambda run: 1e-5 if run == "graph" else 2e-5)
    subjects, head = Subjects(DenseBackend(), "cpu"), {"bench": "gpu", "kernels": "dense", "copy_gb_per_s": 4300.0}
    rows = [
        {**head, **command.attempted(case, partial(command.timed, subjects, case, 4.3e12)), "machine": MACHINE}
        for case in SMALL
    ]
    assert rows[0]["share"] == round(SMALL[0].num_bytes / 1e-5 / 4.3e12, 4) and rows[0]["called_us"] == 20.0
    assert rows[-1]["tokens_per_s"] == 4_000_000
    recorded = tmp_path / "gpu.json"
    recorded.write_text(json.dumps([rows[0] | {"target": 0.85}, *rows[1:]]))
    assert command.main(["--table", str(recorded)]) == 0
    text = capsys.readouterr().out
    assert "On NVIDIA H200 (132 multiprocessors), torch 2.11.0, triton 3.6.0, 2026-11-22." in text
    assert "| attend, 1 row over 512 keys, bfloat16 | dense | 10.0 | 20.0 | 210 | 5% | 85%, missed |" in text
    assert "| prefill of 40 tokens after 64 | dense | 4,000,000 | " in text
    assert page(rows).count("\n| ") == len(rows) + 4 + NUM_PUBLISHED


def test_cases_that_were_not_measured_are_added_from_other_runs(tmp_path, capsys):
    def row(case, date, **more):
        numbers = {
            "kernels": "triton",
            "graph_us": 1.0,
            "called_us": 2.0,
            "gb_per_s": 3.0,
            "share": 0.1,
            "target": None,
        }
        machine = {**MACHINE, "date": date}
        return {**command.attempted(case, lambda: more or numbers), "copy_gb_per_s": 4300.0, "machine": machine}

    old, new = "2026-11-22", "2026-11-23"
    files = {
        "new": [row(SMALL[0], new), row(SMALL[1], new, left_out="needs blake3")],
        "old": [row(SMALL[0], old), row(SMALL[1], old), row(SMALL[2], old)],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps(rows))
    arguments = ["--table", str(tmp_path / "new"), "--more", str(tmp_path / "old")]
    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["what"], each["machine"]["date"]) for each in found] == [
        (label(SMALL[0]), new),
        (label(SMALL[1]), old),
        (label(SMALL[2]), old),
    ]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert f"Measured on {old}, with the code of that date: {label(SMALL[1])}; {label(SMALL[2])}." in text
    assert command.main([*arguments, "--only", label(SMALL[2])]) == 0
    assert "needs blake3" in capsys.readouterr().out


def test_only_filters_the_list(capsys):
    assert command.main(["--list", "--only", "latent"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all("latent" in line for line in lines) and len(lines) < len(list(cases()))


def simulate_gpu(monkeypatch):
    """Patches torch to report a GPU that is never used."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr("bench.gpu.machine.describe", lambda device: MACHINE)


def test_failed_and_skipped_cases_are_one_line_each(monkeypatch, capsys):
    simulate_gpu(monkeypatch)
    monkeypatch.setattr(command, "load", lambda: {"triton": DenseBackend()})
    monkeypatch.setattr(ground, "stand", lambda: None)
    monkeypatch.setattr(ground, "installed", {"transformers": "4.57.1", "numpy": "2.4.6", "psutil": "7.2"}.get)
    monkeypatch.setattr(command, "chosen", lambda text: [Step(99), SMALL[0], Move("pack", 3), Move("store", 5)])

    def timed(subjects, case, bandwidth):
        if case.name == "store":
            raise torch.OutOfMemoryError("so many bytes\nand more")
        if case.name == "pack":
            raise RuntimeError("no kernel image\nsome advice")
        return {"graph_us": 9.0, "called_us": 10.0, "gb_per_s": 1.0, "share": 0.5, "target": None}

    monkeypatch.setattr(command, "timed", timed)
    assert command.main([]) == 1
    output = capsys.readouterr()
    needs = "needs transformers >= 5.15 (here: 4.57.1), safetensors, tokenizers, jinja2, blake3"
    assert f"- Left out: step, 1 row over 99 keys: {needs}\n" in output.out
    assert "- Failed: pack of 3 rows: RuntimeError: no kernel image\n" in output.out
    assert "- Left out: store of 5 rows: does not fit: so many bytes\n" in output.out
    assert "| attend, 1 row over 512 keys, bfloat16 | triton | 9.0 | 10.0 |" in output.out
    assert "  attend, 1 row over 512 keys, bfloat16: 9.0 us\n" in output.err and "Traceback" in output.err
    monkeypatch.setattr(command, "chosen", lambda text: [Step(99), Move("store", 5)])
    assert command.main([]) == 0


def test_rows_are_written_immediately_and_read_from_an_incomplete_file(tmp_path, capsys):
    rows, recorded = [{"a": 1}, {"b": [2, {}]}], tmp_path / "gpu.json"
    for retained in command.told(rows):
        recorded.write_text(
            capsys.readouterr().out if retained is rows[0] else recorded.read_text() + capsys.readouterr().out
        )
        assert command.read(recorded) == rows[: rows.index(retained) + 1]
    recorded.write_text(recorded.read_text() + capsys.readouterr().out)
    assert json.loads(recorded.read_text()) == command.read(recorded) == rows


def test_no_case_is_started_after_the_time_limit(monkeypatch, capsys):
    simulate_gpu(monkeypatch)
    monkeypatch.setattr(command, "row_of", lambda *_: {"graph_us": 1.0})
    monkeypatch.setattr(command, "load", lambda: {"triton": DenseBackend(), "flash, torch": DenseBackend()})
    clock = iter([0.0, 1.0, 6.0]).__next__
    assert len(list(command.measured(SMALL, 5.0, clock))) == 1
    assert "5 s are over: 12 measurements are left out" in capsys.readouterr().err
