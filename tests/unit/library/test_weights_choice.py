"""The choice between whole and sharded weights by the memory of a rank."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from longleaf import weights_choice
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument
from longleaf.resources import Memory
from longleaf.service_settings import ServiceConfig
from longleaf.weights_choice import (
    WeightsInMemory,
    WeightSizes,
    choose_weights,
    sizes_of,
    with_chosen_weights,
    with_weights,
)
from tests.support.small_weights import write_tensors

GB = 10**9


@pytest.mark.parametrize(
    ("weight_bytes", "rank_memory", "world_size", "kv_bytes", "expected"),
    [
        (70 * GB, 80 * GB, 8, 0, "whole"),
        (73 * GB, 80 * GB, 8, 0, "sharded"),
        (60 * GB, 80 * GB, 8, 12 * GB, "whole"),
        (60 * GB, 80 * GB, 8, 13 * GB, "sharded"),
        (140 * GB, 80 * GB, 8, 0, "sharded"),
        (140 * GB, 80 * GB, 1, 0, "whole"),
        (6 * GB, 3 * GB, 4, 0, "sharded"),
    ],
)
def test_weights_are_sharded_where_whole_ones_do_not_fit(weight_bytes, rank_memory, world_size, kv_bytes, expected):
    found = choose_weights("auto", "auto", WeightSizes(weight_bytes), rank_memory, world_size, kv_bytes)
    assert found == WeightsInMemory(expected, "dequantized")


SIZES = WeightSizes(100 * GB, 30 * GB)


@pytest.mark.parametrize(
    ("weights", "weights_dtype", "rank_memory", "expected"),
    [
        ("auto", "auto", 120 * GB, ("whole", "dequantized")),
        ("auto", "auto", 40 * GB, ("whole", "stored")),
        ("auto", "auto", 30 * GB, ("sharded", "dequantized")),
        ("auto", "auto", 10 * GB, ("sharded", "stored")),
        ("auto", "auto", 1 * GB, ("sharded", "stored")),
        ("whole", "auto", 30 * GB, ("whole", "stored")),
        ("sharded", "auto", 120 * GB, ("sharded", "dequantized")),
        ("auto", "stored", 120 * GB, ("whole", "stored")),
        ("auto", "dequantized", 40 * GB, ("sharded", "dequantized")),
        ("auto", "auto", None, ("whole", "dequantized")),
    ],
)
def test_weights_remain_quantized_where_dequantized_ones_do_not_fit(weights, weights_dtype, rank_memory, expected):
    assert choose_weights(weights, weights_dtype, SIZES, rank_memory, 4) == WeightsInMemory(*expected)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with 1000 numbers in 16 bits."""
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    write_tensors(tmp_path / "model.safetensors", {"a": ("BF16", [10, 60]), "b": ("BF16", [400])})
    return tmp_path


def service(folder, **settings):
    engine = {"model": str(folder), "world_size": 4, **settings}
    return ServiceConfig(engine=EngineConfig(**engine))


def chosen(config, num_gpus=0):
    notes = []
    return with_weights(config, num_gpus, notes.append).engine.weights, notes


def test_the_size_of_the_weights_follows_from_their_type(folder):
    assert [sizes_of(folder, dtype).dequantized for dtype in ("auto", "float32", "float16")] == [2000, 4000, 2000]
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert sizes_of(folder, "auto").dequantized == 4000
    (folder / "config.json").write_text("{}")
    assert sizes_of(folder, "auto").dequantized == 2000
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert sizes_of(folder, "float32").dequantized == 4000
    (folder / "model.safetensors").write_bytes(b"")
    assert sizes_of(folder, "auto").dequantized == 0


def test_ranks_on_cpus_divide_the_available_memory(folder, monkeypatch):
    for free, expected in ((4 * 2300, "whole"), (4 * 2200, "sharded")):
        monkeypatch.setattr(weights_choice, "memory", lambda free=free: Memory(1 << 40, free))
        assert chosen(service(folder))[0] == expected


def test_the_choice_is_announced_with_the_bytes_of_each_rank(folder, monkeypatch):
    monkeypatch.setattr(weights_choice, "memory", lambda: Memory(1 << 40, 6144))
    expected = "weights: sharded, about 500 B on each of 4 ranks: all 2.0 KiB do not fit into the 1.5 KiB of a rank"
    assert chosen(service(folder)) == ("sharded", [expected])


def test_ranks_may_share_gpus(folder, monkeypatch):
    monkeypatch.setattr(weights_choice, "gpu_memory", lambda: [9000, 4000])
    assert chosen(service(folder), 4)[0] == "whole"
    assert chosen(service(folder), 2)[0] == "sharded"
    monkeypatch.setattr(weights_choice, "gpu_memory", list)
    assert chosen(service(folder), 2) == ("whole", [])


@pytest.mark.parametrize("given", ["whole", "sharded"])
def test_a_given_choice_is_final(folder, monkeypatch, given):
    monkeypatch.setattr(weights_choice, "memory", lambda: Memory(1 << 40, 1 if given == "whole" else 1 << 40))
    assert chosen(service(folder, weights=given)) == (given, [])


def test_weights_are_whole_where_the_memory_is_unknown(folder):
    assert with_chosen_weights(service(folder).engine, None)[0].weights == "whole"


def test_the_service_chooses_on_a_ray_cluster(folder, monkeypatch):
    """The memory of this machine is not that of the ranks."""
    monkeypatch.setattr(weights_choice, "memory", lambda: Memory(1, 1))
    assert chosen(replace(service(folder), ray_address="auto")) == ("auto", [])
    assert chosen(replace(service(folder, world_size=1), ray_address="auto")) == ("whole", [])


@pytest.mark.parametrize(("rank_memory", "expected"), [(2300, "whole"), (2200, "sharded")])
def test_the_choice_follows_from_the_memory_of_the_nodes(folder, rank_memory, expected):
    engine, reason = with_chosen_weights(service(folder).engine, rank_memory)
    assert engine.weights == expected
    assert bool(reason) == (expected == "sharded")


def test_settings_that_sharded_weights_cannot_meet_are_refused(folder):
    with pytest.raises(InvalidArgument, match="spare_ranks"):
        with_chosen_weights(service(folder, spare_ranks=4).engine, 2200)


def test_packed_numbers_are_counted(tmp_path):
    words = {"a.qweight": torch.zeros(10, 20, dtype=torch.int32), "a.scales": torch.zeros(10, dtype=torch.float16)}
    save_file(words, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert sizes_of(tmp_path, "auto") == WeightSizes(2 * (8 * 200 + 10), 4 * 200 + 2 * 10)


def test_quantized_weights_that_fit_only_as_stored_are_announced(tmp_path, monkeypatch):
    save_file({"a.weight": torch.zeros(1000, dtype=torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}}))
    monkeypatch.setattr(weights_choice, "memory", lambda: Memory(1 << 40, 1536))
    notes = []
    found = with_weights(service(tmp_path, world_size=1), 0, notes.append).engine
    assert (found.weights, found.weights_dtype) == ("whole", "stored")
    reason = "all 2.0 KiB dequantized do not fit into the 1.5 KiB of a rank"
    assert notes == [f"weights: kept as stored, about 1000 B in memory: {reason}"]
    monkeypatch.setattr(weights_choice, "gpu_memory", lambda: [1536])
    assert with_weights(service(tmp_path, world_size=1), 1, notes.append).engine.weights_dtype == "dequantized"
