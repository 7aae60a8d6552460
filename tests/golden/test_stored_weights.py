"""Quantized weights that remain as stored: tokens equal `generate` on the dequantized weights, and each rank holds the
bits of the checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coordinator.engine.engine import Engine
from longleaf.errors import ModelRefused, StartError
from longleaf.kernels.cpu.quantized_linear import NativeQuantizedLinear, QuantizedLinear
from longleaf.shares import NUM_PARTS
from tests.golden.test_quantized_weights import LAYOUTS, make
from tests.support.golden.asking import answer
from tests.support.golden.plain import LOGIT_TOLERANCE, Golden, ask_plain, draw_ids
from tests.support.golden.states import Logits
from tests.support.running import running as run
from tests.support.threads import ThreadRanks, config_for
from workers.model.model import load
from workers.model.sharded_model import load_share
from workers.model.stored_layers import weight_bytes
from workers.model.weight_shares import Share
from workers.rank import Rank
from zoo.checkpoints import make_checkpoint

NUM_NEW, NUM_PROMPT = 24, 200
STORED = [name for name in LAYOUTS if name not in ("mxfp4", "int4 with zero points", "int8 in shuffled groups")]
"""Layouts of which tensors remain as stored. That of experts, groups of 8, and shuffled groups do not."""
STORED.remove("gptq with act-order")


def quantized_layers(module: torch.nn.Module) -> dict[str, QuantizedLinear]:
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}


@pytest.mark.parametrize("layout", STORED)
def test_layers_hold_the_weights_that_the_numbers_represent(tmp_path: Path, layout: str) -> None:
    expected = make(tmp_path, layout)
    model = load(str(tmp_path), "float32", "cpu", keeps_stored=True)
    found = quantized_layers(model.module)
    assert found
    for name, layer in found.items():
        assert torch.equal(layer.matrix.dequantize(), expected[f"{name}.weight"]), name
        torch.testing.assert_close(layer.weight, expected[f"{name}.weight"], rtol=2**-22, atol=0)


def test_zero_points_of_awq_are_stored(tmp_path: Path) -> None:
    make(tmp_path, "awq")
    layers = quantized_layers(load(str(tmp_path), "float32", "cpu", keeps_stored=True).module)
    assert len(layers) == 14
    assert all(layer.matrix.kind == "int4" and layer.matrix.zeros is not None for layer in layers.values())


@pytest.mark.parametrize("layout", ["mxfp4", "int4 with zero points", "gptq with act-order"])
def test_other_layouts_are_dequantized(tmp_path: Path, layout: str) -> None:
    make(tmp_path, layout)
    plain = load(str(tmp_path), "float32", "cpu").module.state_dict()
    found = load(str(tmp_path), "float32", "cpu", keeps_stored=True).module.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in plain.items())


class ReadingRank(Rank):
    """After its start it holds parts in many places, as after several losses."""

    def load(self, parts: Sequence[int] = ()) -> None:
        super().load(parts)
        if parts:
            self.hold([part for part in range(NUM_PARTS) if part // 7 % 2 == self._spec.member])


@pytest.fixture(scope="module")
def stored_goldens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    """By layout, a quantized checkpoint and the answer of `generate` on its dequantized weights."""
    found = dict[str, Golden]()
    for layout in ("fp8 32x16", "int4 in groups of 32", "awq", "fp8 by channel"):
        folder = tmp_path_factory.mktemp("stored")
        weights = make(folder / "quantized", layout)
        make_checkpoint(folder / "plain", LAYOUTS[layout][0], num_layers=2)
        save_file(weights, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
        golden, gap = ask_plain(folder / "plain", draw_ids(NUM_PROMPT), NUM_NEW)
        assert gap > 1e-3
        found[layout] = Golden(folder / "quantized", golden.prompt, golden.tokens, golden.logits_TV)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["fp8 32x16", "int4 in groups of 32", "awq", "fp8 by channel"])
@pytest.mark.parametrize(
    ("world_size", "weights", "make_rank"),
    [(1, "whole", Rank), (2, "whole", Rank), (2, "sharded", Rank), (2, "sharded", ReadingRank)],
)
async def test_tokens_equal_generate_on_the_dequantized_weights(
    stored_goldens: dict[str, Golden], layout: str, world_size: int, weights: str, make_rank: type[Rank]
) -> None:
    golden, logits = stored_goldens[layout], Logits()
    settings = {"weights": weights, "weights_dtype": "stored", "chunk_size": 64}
    config = config_for(golden.folder, world_size=world_size, **settings)
    engine = Engine(ThreadRanks(config, logits.watch, make_rank=make_rank), config, max_positions=8192)
    async with run(engine) as found:
        assert await answer(found.engine, golden.prompt, num_new=NUM_NEW) == golden.tokens
    difference = (logits.first(NUM_NEW) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


@pytest.mark.parametrize("layout", ["fp8 32x16", "int8 by channel", "int4 in groups of 32", "awq", "nvfp4"])
def test_a_rank_that_holds_other_parts_has_their_bits(tmp_path: Path, layout: str) -> None:
    make(tmp_path, layout)
    found = load_share(str(tmp_path), "float32", "cpu", Share.even(0, 3), keeps_stored=True)
    first = {name: layer.matrix.dequantize() for name, layer in quantized_layers(found.model.module).items()}
    for parts in (tuple(range(0, 240, 2)), tuple(range(60, 200)), Share.even(0, 3).parts):
        found.weights.hold(parts)
        wanted = load_share(str(tmp_path), "float32", "cpu", Share(parts, 3), keeps_stored=True)
        layers, others = quantized_layers(found.model.module), quantized_layers(wanted.model.module)
        assert len(layers) == len(others) == 14
        for name, layer in layers.items():
            assert torch.equal(layer.matrix.dequantize(), others[name].matrix.dequantize()), name
    assert all(torch.equal(layers[name].matrix.dequantize(), weights) for name, weights in first.items())


@pytest.mark.parametrize(("layout", "bits"), [("fp8 by tensor", 8), ("int4 in groups of 32", 5)])
def test_memory_is_that_of_the_stored_bits(tmp_path: Path, layout: str, bits: int) -> None:
    """Scales of int4 are in float32 here, one per group of 32."""
    make(tmp_path, layout)
    module = load(str(tmp_path), "float32", "cpu", keeps_stored=True).module
    layers = quantized_layers(module).values()
    numbers = sum(layer.matrix.num_outputs * layer.matrix.num_inputs for layer in layers)
    rows = sum(4 * layer.matrix.num_outputs for layer in layers)
    assert sum(layer.matrix.num_bytes for layer in layers) <= numbers * bits / 8 * 1.01 + rows
    assert weight_bytes(module) == sum(one.nbytes for one in module.parameters()) + sum(
        layer.matrix.num_bytes for layer in layers
    )


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    make(tmp_path, "fp8 32x16")
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if name.endswith("up_proj.weight"))
    stored[name].view(torch.uint8)[3, 3] = 0x7F
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=f"{name}.*a number is not finite"):
        load(str(tmp_path), "float32", "cpu", keeps_stored=True)


def test_without_a_compiled_kernel_the_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NativeQuantizedLinear:
        raise OSError("no compiler")

    make(tmp_path, "fp8 by tensor")
    monkeypatch.setattr(NativeQuantizedLinear, "load", fail)
    with pytest.raises(StartError, match="weights_dtype: stored requires a compiled kernel: no compiler"):
        load(str(tmp_path), "float32", "cpu", keeps_stored=True)
