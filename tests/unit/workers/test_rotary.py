"""Rotary phases: bit-identical to the model's own at near positions, and accurate at far positions in float64."""

import math
from copy import deepcopy
from decimal import Decimal, getcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from longleaf.errors import ModelRefused
from longleaf.positions import FLOAT32_POSITIONS, OWN_ROPE, Rope, Rotary
from workers.model.rotary import LongRotary, Ropes, replace_rotary, row_ropes

DOUBLE = Rope(is_double=True)
FAR = (1_000_000, 8_000_000, 20_000_000)
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 500000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "rope_theta": 10000.0,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
    "yarn": ("Qwen3Config", {"rope_parameters": YARN}),
    "longrope": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512}),
    "two ropes": ("Gemma3TextConfig", {}),
    "partial": ("GPTNeoXConfig", {"rotary_pct": 0.25}),
    "pairs": ("Cohere2Config", {}),
    "single": ("GptOssConfig", EXPERTS),
    "always float32": ("Olmo2Config", {}),
    "complex": ("Llama4TextConfig", {**EXPERTS, "intermediate_size_mlp": 32}),
}


def rotary_of(model: transformers.PreTrainedModel) -> nn.Module:
    return next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))


def make(family: str) -> tuple[nn.Module, transformers.PreTrainedModel]:
    """A rotary module that replaces the model's own, and the model."""
    name, special = deepcopy(FAMILIES[family])
    config = getattr(transformers, name)(**{**COMMON, **special})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
        own = rotary_of(AutoModelForCausalLM.from_config(config))
    return own, model


def parts(answer: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (answer,) if isinstance(answer, torch.Tensor) else answer


def exact_angle(position: int, base: float, exponent: Decimal) -> float:
    """position / base^exponent, reduced to one turn, by decimal arithmetic of 50 digits."""
    getcontext().prec = 50
    turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510")
    return float((position / Decimal(base) ** exponent) % turn)


def replace(model: Any) -> tuple[Ropes, Rotary]:
    """Replaces the rotary modules in the layers of a model, as a rank does."""
    return replace_rotary(model.base_model, model.config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_positions_are_bit_identical_to_the_model(family: str, dtype: torch.dtype) -> None:
    own, model = make(family)
    _, facts = replace(model)
    assert not facts.reason
    new = rotary_of(model)
    assert isinstance(new, LongRotary)
    last = min(facts.scaled_from or FLOAT32_POSITIONS, FLOAT32_POSITIONS)
    positions = torch.cat((torch.arange(0, 300), torch.arange(last - 300, last)))[None]
    x = torch.zeros(1, dtype=dtype)
    for layer in new.kinds:
        options = () if layer is None else (layer,)
        for wanted, found in zip(parts(own(x, positions, *options)), parts(new(x, positions, *options)), strict=True):
            assert wanted.dtype == found.dtype
            assert torch.equal(wanted, found)


@pytest.mark.parametrize("theta", [500.0, 10000.0, 500000.0])
def test_far_phases_are_accurate_only_in_float64(theta: float) -> None:
    special = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**COMMON, **special}))
    ropes, facts = replace(model)
    for last in FAR:
        positions = [last - 3, last - 2, last - 1]
        angles = [[exact_angle(p, theta, Decimal(2 * i) / 16) for i in range(8)] for p in positions]
        wanted_TN = torch.tensor([[math.cos(a) for a in row] for row in angles], dtype=torch.float64)
        errors = {}
        for rope in (DOUBLE, OWN_ROPE):
            ropes.rows = {rope: None}
            cos, _ = rotary_of(model)(torch.zeros(1), torch.tensor([positions]))
            errors[rope] = (cos[0, :, :8].double() - wanted_TN).abs().max().item()
        assert errors[DOUBLE] <= 2**-23 + last * facts.float64_error
        assert last * facts.float64_error < 1e-6
        assert errors[OWN_ROPE] > 1e-3


def test_float32_error_bound_holds_and_is_tight() -> None:
    """The reported bound holds, and is less than three times the actual error."""
    special = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**COMMON, **special}))
    _, facts = replace(model)
    new = rotary_of(model)
    single_N, double_N = new.frequencies(None)
    for last in (FLOAT32_POSITIONS, 1_000_000, 8_000_000):
        positions = torch.arange(last - 4000, last)[:, None]
        error = (positions.float() * single_N - positions * double_N).abs().max().item()
        assert error <= last * facts.float32_error <= 3 * error


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_frequencies_round_to_those_of_the_model(family: str) -> None:
    _, model = make(family)
    replace(model)
    new = rotary_of(model)
    for layer in new.kinds:
        for scaled_for in (0, 1 << 20):
            single, double = new.frequencies(layer, scaled_for)
            assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
            torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)
            assert (double.float().double() != double).any(), "these were computed in float32"


def test_float64_frequencies_are_computed_without_float32() -> None:
    """With heads of 24 dims, as with the 96 dims of Phi-3, the exponents 2i / 24 have no float32 representation."""
    factors = [1.0 + i / 16 for i in range(12)]
    rope = {**LONGROPE, "short_factor": factors, "long_factor": factors}
    special = {"hidden_size": 96, "head_dim": 24, "rope_parameters": rope, "original_max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(transformers.Phi3Config(**{**COMMON, **special}))
    replace(model)
    _, double_N = rotary_of(model).frequencies(None)
    wanted_N = [float(1 / (Decimal(f) * Decimal(10000) ** (Decimal(2 * i) / 24))) for i, f in enumerate(factors)]
    torch.testing.assert_close(double_N, torch.tensor(wanted_N, dtype=torch.float64), rtol=1e-15, atol=0)


def test_each_row_has_its_own_rope() -> None:
    _, model = make("longrope")
    ropes, facts = replace(model)
    new, positions = rotary_of(model), torch.tensor([[5, 5, 1_000_000, 1_000_000, 7]])
    wanted = (OWN_ROPE, Rope(scaled_for=513), Rope(scaled_for=513, is_double=True), Rope(scaled_for=513), OWN_ROPE)
    ropes.rows = row_ropes(wanted, "cpu")
    together = new(torch.zeros(1), positions)
    for i, rope in enumerate(wanted):
        ropes.rows = {rope: None}
        alone = new(torch.zeros(1), positions[:, i : i + 1])
        assert all(torch.equal(a[:, i : i + 1], b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(together[0][:, 0], together[0][:, 1])
    assert not torch.equal(together[0][:, 2], together[0][:, 3])
    assert facts.scaled_from == 512


@pytest.mark.parametrize("family", ["longrope", "dynamic"])
def test_length_scaling_equals_transformers(family: str) -> None:
    own, model = make(family)
    ropes, facts = replace(model)
    length = 3 * facts.scaled_from
    ropes.rows = {Rope(scaled_for=length if facts.is_graded else facts.scaled_from + 1): None}
    positions = torch.tensor([[0, 1, 17, length - 1]])
    for wanted, found in zip(own(torch.zeros(1), positions), rotary_of(model)(torch.zeros(1), positions), strict=True):
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)


@pytest.mark.parametrize(("original", "trained"), [(2048, 8192), (8192, 32768)])
def test_trained_length_is_the_yarn_length(original: int, trained: int) -> None:
    rope = {**YARN, "original_max_position_embeddings": original}
    config = transformers.Qwen3Config(**{**COMMON, "rope_parameters": rope})
    assert replace(AutoModelForCausalLM.from_config(config))[1].trained == trained


class CustomRotary(nn.Module):
    """A custom rotary module."""

    def __init__(self, own: nn.Module, rope_type: str) -> None:
        super().__init__()
        self.config, self.rope_type, self.attention_scaling = own.config, rope_type, 1.0
        self.compute_default_rope_parameters = own.compute_default_rope_parameters
        self.inv_freq = nn.Buffer(own.inv_freq.clone(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].float().sqrt() * self.inv_freq
        return phases.cos(), phases.sin()


def test_irreplaceable_module_limits_positions_to_its_accuracy() -> None:
    own, model = make("llama")
    model.model.rotary_emb = CustomRotary(own, "default")
    _, facts = replace(model)
    assert isinstance(rotary_of(model), CustomRotary)
    assert facts.max_positions == FLOAT32_POSITIONS
    assert "CustomRotary cannot be replaced: it has an unknown layout" in facts.reason


def test_irreplaceable_module_with_batch_scaling_is_refused() -> None:
    own, model = make("dynamic")
    model.model.rotary_emb = CustomRotary(own, "dynamic")
    with pytest.raises(ModelRefused, match="depend on the longest position, and CustomRotary cannot"):
        replace(model)


def test_unused_long_factors_are_refused() -> None:
    """Phi-3.5-MoE uses the short factors at every length."""
    scales = {"factor": 4.0, "short_mscale": math.sqrt(1 + math.log(4) / math.log(512))}
    rope = {**LONGROPE, **scales, "long_mscale": 1.0, "original_max_position_embeddings": 512}
    config = transformers.PhimoeConfig(**{**COMMON, **EXPERTS, "rope_parameters": rope})
    with pytest.raises(ModelRefused, match="does not use the long factors of its config past the original length"):
        replace(AutoModelForCausalLM.from_config(config))


def test_learned_positions_end_at_the_size_of_their_table() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=128)
    _, facts = replace(AutoModelForCausalLM.from_config(config))
    assert (facts.kind, facts.trained, facts.max_positions) == ("", 128, 128)


LAYER_TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("GraniteSWAConfig", {"layer_types": LAYER_TYPES, "sliding_window": 8, "layer_rope_theta": [1e4, 1e6]}),
        (
            "GraniteMoeSWAConfig",
            {"layer_types": LAYER_TYPES, "sliding_window": 8, "layer_rope_theta": [1e4, 0], **EXPERTS},
        ),
        ("Lfm3Config", {"layer_types": LAYER_TYPES, "sliding_window": 8}),
        (
            "Qwen3VLTextConfig",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        ),
    ],
)
def test_models_that_inspect_their_rotary_modules_compute_the_same(name: str, special: dict[str, Any]) -> None:
    """Granite reads configs, LFM3 types of layers, and Qwen3-VL passes three positions for each row."""
    config = getattr(transformers, name)(**{**COMMON, "num_hidden_layers": 2, "pad_token_id": 2, **special})
    with torch.random.fork_rng(devices=[]):
        model = AutoModel.from_config(config).eval()
    ids, positions = torch.arange(3, 23)[None], torch.arange(100, 120)[None]
    with torch.inference_mode():
        wanted = model(ids, position_ids=positions).last_hidden_state
        _, facts = replace(model)
        found = model(ids, position_ids=positions).last_hidden_state
    assert (facts.reason, torch.equal(wanted, found)) == ("", True)


def test_rows_of_one_rope_need_no_masks() -> None:
    assert row_ropes([DOUBLE, DOUBLE], "cpu") == {DOUBLE: None}
    assert Ropes().rows == {OWN_ROPE: None}
