"""The table of kernels, and the self-test of the selected kernels."""

import logging
from typing import get_args

import pytest
import torch

from longleaf.attention import Partial
from longleaf.config import KernelsName
from longleaf.errors import StartError
from longleaf.kernels import registry
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.probe import MANY, probe

FLOAT32 = torch.float32


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


HERE = [name for name, entry in registry.TABLE.items() if entry.device in (None, "cpu")]
"""Kernels that this machine can run; those of GPUs are in `tests/triton`."""


def test_table_has_every_backend_name():
    assert tuple(registry.TABLE) == get_args(KernelsName)
    for name in HERE:
        assert registry.choose(name, "cpu", FLOAT32).name == name


def test_auto_selects_compiled_kernels_on_cpus_and_logs_it(caplog):
    with caplog.at_level(logging.INFO, "longleaf"):
        assert registry.choose("auto", "cpu", FLOAT32).name == "compiled"
    assert caplog.messages == ["kernels: compiled"]


def test_auto_falls_back_to_torch_without_a_compiler(no_compiler, caplog):
    with caplog.at_level(logging.WARNING, "longleaf"):
        assert registry.choose("auto", "cpu", FLOAT32).name == "torch"
    [line] = caplog.messages
    assert line.startswith("kernels: compiled is not available on cpu: ") and "'cc'" in line
    assert line.endswith("; using torch instead (slower)")


def test_requested_kernels_are_not_replaced(no_compiler):
    with pytest.raises(StartError, match=r"^kernels: compiled is not available on cpu: .*'cc'"):
        registry.choose("compiled", "cpu", FLOAT32)


@pytest.mark.parametrize("name", ["compiled", "torch"])
def test_cpu_kernels_are_not_used_on_gpus(name):
    with pytest.raises(StartError, match=f"^kernels: {name} runs on cpu, but this rank is on cuda:1$"):
        registry.choose(name, "cuda:1", FLOAT32)


def test_gpu_can_use_device_independent_kernels(monkeypatch):
    tried = []
    monkeypatch.setattr(registry, "probe", lambda *of: tried.append(of))
    chosen = registry.choose("auto", "cuda:1", torch.bfloat16)
    assert chosen.name == "dense"
    assert tried == [(chosen, "cuda:1", torch.bfloat16)]


@pytest.mark.parametrize("name", ["auto", "dense"])
def test_kernels_that_fail_the_self_test_are_not_used(monkeypatch, name):
    monkeypatch.setattr(registry, "probe", lambda *of: "fold is off by 3, where rounding explains 0.00001")
    with pytest.raises(StartError, match=r"^kernels: (compiled|dense) is wrong on cpu: fold is off by 3, .*--kernels"):
        registry.choose(name, "cpu", FLOAT32)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16, torch.float16])
def test_kernels_pass_their_self_test(name, dtype):
    assert probe(registry.TABLE[name].make(), "cpu", dtype) is None


def changed(operation, change):
    """Kernels with one operation replaced: `change` receives the original operation and its arguments."""
    backend = NativeBackend()
    right = getattr(backend, operation)
    setattr(backend, operation, lambda *args: change(right, *args))
    return backend


def over_keys(change):
    """An attention operation over changed keys and values."""

    def attend(right, q, k, v, *rest):
        k, values = change(k), change(v)
        return right(q, k, values if v.shape == k.shape else k[..., : v.shape[2]], *rest)

    return attend


def of_result(change_out=lambda out: out, change_lse=lambda lse: lse):
    def change(right, *args):
        found = right(*args)
        return Partial(change_out(found.out_THD), change_lse(found.lse_TH))

    return change


def of_many_rows(right, q, *rest):
    found = right(q, *rest)
    return Partial(found.out_THD, found.lse_TH + 0.1 * (len(q) == MANY))


def of_reads(**fields):
    return lambda right, q, k, v, reads, *rest: right(q, k, v, [read._replace(**fields) for read in reads], *rest)


def of_latents(right, q, k, v, *rest):
    return right(q, k, v if v.shape == k.shape else k[..., k.shape[2] - v.shape[2] :].contiguous(), *rest)


def halved(right, pool, slots, k, v):
    right(pool, slots, k, v / 2)


def torn(right, pool, slots, k, v):
    """A fault: each call rounds with its own scales."""
    pool.exponents_KBD.fill_(-20)
    right(pool, slots, k, v)


WRONG = {
    "base 2": ("attend", of_result(change_lse=lambda lse: lse / 0.693147), "attend of 3 rows is off"),
    "empty rows of lse 0": (
        "attend",
        of_result(change_lse=lambda lse: lse.nan_to_num(neginf=0.0)),
        "attend of 3 rows is off",
    ),
    "empty rows of lse inf": ("attend", of_result(change_lse=torch.abs), "attend of 3 rows is off"),
    "many rows": ("attend", of_many_rows, f"attend of {MANY} rows is off"),
    "no window": ("attend", of_reads(window=None), "attend of 3 rows is off"),
    "no mask": ("attend", of_reads(offset=None), "attend of 3 rows is off"),
    "no cap": ("attend", lambda right, *args: right(*args[:5]), "attend of 3 rows with a soft cap is off"),
    "other key heads": ("attend", over_keys(lambda numbers: numbers.flip(0)), "attend of 3 rows is off"),
    "values from elsewhere in the latents": ("attend", of_latents, "attend over latents is off"),
    "NaN hidden": ("attend", over_keys(torch.nan_to_num), "attend of 3 rows does not show"),
    "NaN beyond its reads": ("attend", over_keys(lambda k: k + 0 * k.sum()), "attend of 3 rows is off by NaN"),
    "8 bits": ("attend_int8", of_result(change_lse=lambda lse: lse + 0.1), "attend_int8 is off"),
    "other slots": ("store", lambda right, pool, slots, tokens: right(pool, slots + 1, tokens), "store does"),
    "no values": ("store", lambda right, pool, slots, tokens: right(pool[:1], slots, tokens), "store does"),
    "half values": ("store_int8", halved, "store_int8 rounds values"),
    "keys of other scales": ("store_int8", torn, "store_int8 rounds keys"),
    "rounded": ("pack", lambda right, part, dtype: right(part, torch.bfloat16).to(dtype), "pack to float32"),
    "lse first": ("pack", lambda right, *args: right(*args).roll(1, -1), "pack to float32"),
    "one left out": ("fold", lambda right, packed: right(packed[:-1]), "fold is off"),
    "empty rows of NaN": ("fold", of_result(change_out=lambda out: out / (out != 0)), "fold is off by NaN"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_self_test_detects(wrong):
    operation, change, reported = WRONG[wrong]
    found = probe(changed(operation, change), "cpu", FLOAT32)
    assert found is not None and found.startswith(reported)
