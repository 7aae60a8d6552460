"""Shares of weights read from files: the bits of the whole parameters, and no more bytes than needed."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from longleaf.errors import ModelRefused
from tests.support.golden.plain import load_plain
from workers.model.meta_model import outline
from workers.model.model import build_on_meta, read_config
from workers.model.sharded_model import load_share
from workers.model.weight_parts import plan_weights
from workers.model.weight_reader import open_weights, read_share
from workers.model.weight_shares import Share, take
from zoo.checkpoints import make_checkpoint

FAMILIES = ["llama", "mixtral", "qwen3_moe", "gpt2", "phi3", "qwen2.5", "llama4", "mistral3", "deepseek_v3"]
"""Plain, stacked and converted experts, transposed weights, tied ones, and renamed parts."""


def read(folder, share, plan):
    module = build_on_meta(read_config(str(folder)), "float32")
    return module, read_share(module, folder, plan.cuts, share, torch.float32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_share_has_the_bits_of_the_whole_parameters(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    known = outline(str(folder), "float32")
    plan, plain = plan_weights(known, 3), load_plain(folder).state_dict()
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for index in range(3):
        share = Share.even(index, 3)
        module, loaded = read(folder, share, plan)
        assert not (loaded.missing or loaded.mismatched)
        for name, parameter in module.state_dict().items():
            wanted = take(plain[name], plan.cuts[name], share) if name in plan.cuts else plain[name]
            assert torch.equal(parameter, wanted), name
        local_bytes = sum(parameter.nbytes for parameter in module.parameters())
        assert loaded.num_bytes <= local_bytes + 0.02 * whole
        assert local_bytes < 0.6 * whole


def test_a_share_of_several_files_is_the_same(tmp_path):
    folder = make_checkpoint(tmp_path / "one", "llama")
    plain = load_plain(folder)
    plain.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    plan, share = plan_weights(outline(str(folder), "float32"), 2), Share.even(1, 2)
    (one, _), (many, _) = (read(path, share, plan) for path in (folder, tmp_path / "many"))
    assert all(torch.equal(many.state_dict()[name], found) for name, found in one.state_dict().items())


def test_dtypes_are_converted_as_they_are_read(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    module = build_on_meta(read_config(str(folder)), "bfloat16")
    plan = plan_weights(outline(str(folder), "bfloat16"), 2)
    read_share(module, folder, plan.cuts, Share.even(0, 2), torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("ranges", "count"), [([(0, 3)], 1), ([(0, 2)], 2), ([(0, 1), (2, 3)], 4)])
def test_a_range_of_an_inner_dim_is_read_by_rows_and_all_of_it_at_once(tmp_path, monkeypatch, ranges, count):
    (tmp_path / "config.json").write_text("{}")
    wanted, calls = torch.arange(6.0).reshape(2, 3), list[int]()
    save_file({"a": wanted}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as (tensors, reader):
        read = reader.read
        monkeypatch.setattr(
            reader, "read", lambda file, start, buffer: (calls.append(start), read(file, start, buffer))
        )
        found = tensors["a"].restricted_to(1, ranges)[:]
    assert torch.equal(found, torch.cat([wanted[:, start:end] for start, end in ranges], 1))
    assert len(calls) == count


def write(path, header, data=b""):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "not the size of its shape"),
        ({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, "F31"),
        ({"a": 1}, "Expected"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, header, reason):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelRefused, match=reason), open_weights(tmp_path):
        pass


def test_an_index_that_cannot_be_read_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelRefused, match="cannot be loaded as a causal language model: Expecting property name"):
        load_share(str(folder), "float32", "cpu", Share.even(0, 2))


def test_weights_are_read_where_the_system_takes_no_advice(tmp_path, monkeypatch):
    """POSIX_FADV_RANDOM is missing on macOS."""
    folder = make_checkpoint(tmp_path, "llama")
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(os, "POSIX_FADV_RANDOM")
    with open_weights(folder) as (tensors, _):
        assert tensors["model.norm.weight"][...].shape == (64,)


def test_a_file_that_ends_early_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    [path] = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelRefused, match="bytes before the end of tensor"), open_weights(folder):
        pass


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    [path] = folder.glob("*.safetensors")
    with open_weights(folder) as (tensors, _):
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(ValueError, match="ends before"):
            _ = [tensor[...] for tensor in tensors.values()]
