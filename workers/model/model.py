"""Loads an unmodified transformers causal LM and proves that all its attention goes through the hook."""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from longleaf.config import DtypeName
from longleaf.errors import ModelRefused, StartError
from longleaf.kernels.backend import lies_in
from longleaf.kernels.cpu.quantized_linear import NativeQuantizedLinear
from longleaf.positions import AttentionSpan, Rotary
from workers.model import hook, latent
from workers.model.mixers import Mix, Mixers, describe_layers, replace_mixers
from workers.model.quantized_weights import Quantization, pop_quantization
from workers.model.rotary import Ropes, Rows, replace_rotary
from workers.model.sharded_layers import RowExchange
from workers.model.stored_layers import load_kernel
from workers.model.weight_reader import check_types, dtype_of, read_share
from workers.model.weight_shares import Share
from workers.model.weights import SAFE_WEIGHTS, check_weights, large_blocks_apart, loading_to_device

log = logging.getLogger("longleaf.model")  # messages logged while a rank loads are shown to users

PROBES = ((3, 5), (4, 11))
"""The forward passes of the preflight: the number of different tokens that each repeats in turn, and its number of
rows.
"""
NUM_CANDIDATES = 64
"""Ids among which the preflight looks for tokens whose embeddings differ."""
UNTRUSTED: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options for reading any part of a checkpoint. With None, transformers would ask on standard input whether to run its
code.
"""
LAYER_TYPES = {
    "indexed_attention": "a learned indexer",
    "minimax_m3_sparse": "a learned indexer",
    "compressed_sparse_attention": "compressed keys",
    "heavily_compressed_attention": "compressed keys",
    "reference_sliding_attention": "a window over the answer only",
}
"""Types of layers, in the terms of transformers, that do not attend to each visible token's own key, with the mechanism
they use instead. None of them is supported.
"""
WITH_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers with a recurrent state, some of them beside attention: see `workers.model.mixers`."""
WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}
"""Types of layers that do not attend."""
CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention")
"""Names of transformers modules that attend to an encoder."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Heads, key heads, dims and reach of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    reach: AttentionSpan
    latent_dim: int | None = None
    """Values are the first `latent_dim` dims of the keys, and are not stored separately; None: they are stored beside
    the keys.
    """
    own_value_dim: int | None = None
    """Dim of values that are stored beside the keys; None: that of the keys."""

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.own_value_dim or self.head_dim

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Dims of the tensors that hold keys and values."""
        return (self.head_dim,) if self.latent_dim is not None else (self.head_dim, self.value_dim)

    @property
    def num_stored(self) -> int:
        """Numbers that are kept per token."""
        return self.num_kv_heads * sum(self.stored_dims)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded checkpoint and its attention layers, by layer index."""

    module: PreTrainedModel
    layers: dict[int, LayerSpec]
    device: str
    dtype: torch.dtype
    ropes: Ropes
    """Set before each forward pass: the rope by which each row is rotated."""
    rotary: Rotary
    exchange: RowExchange | None = None
    """Exchanges of layers whose weights are divided over the ranks; None if this rank holds all weights."""
    spare_bytes: int = 0
    """Bytes of memory set aside for weights of lost ranks."""
    mixers: Mixers | None = None
    """The layers with a recurrent state; None if there are none."""
    ends_with_mixer: bool = False
    """Whether a mixer computes rows after the last attention layer."""
    layouts: tuple[str, ...] = ()
    """Layouts in the checkpoint of the weights that were dequantized, the most frequent first."""

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        return decoder_of(self.module)

    def arguments(self, step: hook.Attend, token_ids_T: Tensor, positions_T: Tensor) -> dict[str, Any]:
        """The arguments of a forward pass over rows of any sequences, in any order."""
        return hook.arguments(step, token_ids_T, positions_T, has_offsets=asks_for_offsets(self.module))

    def run(
        self,
        step: hook.Attend,
        token_ids_T: Tensor,
        positions_T: Tensor,
        ropes: Rows,
        rows_R: Tensor | None = None,
        *,
        has_own_rows: bool = False,
        mix: Mix | None = None,
    ) -> Tensor | None:
        """Runs rows of any sequences, in any order, through the decoder. With `rows_R`, also runs the head, and returns
        the logits [R, V] of these rows. `has_own_rows`: the rows of other ranks are different ones. `mix` computes
        rows in mixers, if there are any.
        """
        self.ropes.rows = ropes
        if self.exchange is not None:
            self.exchange.set_rows(own=has_own_rows)
        arguments = self.arguments(step, token_ids_T, positions_T)
        with contextlib.nullcontext() if self.mixers is None else self.mixers.use(mix):
            if rows_R is None:
                self.decoder(**arguments, return_dict=False)
                return None
            return self.module(**arguments, return_dict=False, logits_to_keep=rows_R)[0][0]

    @property
    def last_layer(self) -> int:
        return max(self.layers)

    @property
    def last_mixer(self) -> int | None:
        """The mixer that ends the computation of keys and states; None if attention ends it."""
        return max(self.mixers.layers) if self.mixers is not None and self.ends_with_mixer else None

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the recurrent state of one sequence over all layers; 0 without mixers."""
        return 0 if self.mixers is None else self.mixers.num_bytes(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return sum(layer.num_stored for layer in self.layers.values()) * self.dtype.itemsize


class Probe:
    """The attention of the preflight: records the attention calls of each layer and returns zeros.

    All rows have the same position, so rows of the same token must be equal in every layer, regardless of the tokens
    between them. That proves something only if rows of different tokens differ: with `has_weights`, rows that are zero,
    the same for all tokens, or not finite are refused.
    """

    def __init__(self, config: PreTrainedConfig, token_ids: Sequence[int], *, has_weights: bool = True) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.ends_with_mixer = False
        self._config = config
        self._ids = token_ids
        self._has_weights = has_weights

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: hook.LayerCall) -> Tensor:
        if call.unsupported:
            raise ModelRefused(f"attention layer {layer} uses `{call.unsupported}`, which is not supported")
        latent_dim = v_KTV.shape[2] if lies_in(v_KTV, k_KTD) else None
        if k_KTD.shape[:2] != v_KTV.shape[:2]:
            raise ModelRefused(
                f"attention layer {layer} has more key or value heads than query heads, which is not supported"
            )
        has_own_dim = latent_dim is None and k_KTD.shape != v_KTV.shape
        if call.sink_H is not None and call.sink_H.shape != q_THD.shape[1:2]:
            raise ModelRefused(f"attention layer {layer} has sinks that are not one per head, which is not supported")
        if layer in self.layers:
            raise ModelRefused(f"attention layer {layer} attends twice")
        for name, rows in (("queries", q_THD), ("keys", k_KTD.transpose(0, 1)), ("values", v_KTV.transpose(0, 1))):
            self._check_rows(layer, name, rows)
        reach = reach_of(self._config, layer, call.window)
        value_dim = v_KTV.shape[2] if has_own_dim else None
        self.ends_with_mixer = False
        self.layers[layer] = LayerSpec(q_THD.shape[1], k_KTD.shape[0], k_KTD.shape[2], reach, latent_dim, value_dim)
        return q_THD.new_zeros(*q_THD.shape[:2], v_KTV.shape[2])

    def mix(self, mixer: nn.Module, hidden_TF: Tensor) -> Tensor:
        """Zeros in place of the results of a mixer, which may differ between rows of the same token."""
        self.ends_with_mixer = True
        return torch.zeros_like(hidden_TF)

    def _check_rows(self, layer: int, name: str, rows_THD: Tensor) -> None:
        """Raises ModelRefused unless rows of the same token are equal, and rows of different tokens differ."""
        if self._has_weights and not rows_THD.isfinite().all():
            raise ModelRefused(f"attention layer {layer} computes non-finite {name}")
        first_T = torch.tensor([self._ids.index(i) for i in self._ids], device=rows_THD.device)
        if not _is_alike(rows_THD, rows_THD[first_T]):
            raise ModelRefused(f"attention layer {layer} depends on more of a token than its id and its position")
        if not self._has_weights:
            return
        firsts = rows_THD[first_T.unique()]
        if not firsts.flatten(1).any(dim=1).all():
            raise ModelRefused(f"attention layer {layer} computes {name} that are zero, so its exactness is unknown")
        if torch.equal(firsts, firsts[:1].expand_as(firsts)):
            raise ModelRefused(
                f"attention layer {layer} computes the same {name} for all tokens, so its exactness is unknown"
            )


def _is_alike(rows: Tensor, expected: Tensor) -> bool:
    """Whether rows equal the expected ones, up to rounding."""
    return torch.allclose(rows, expected, rtol=0.01, atol=0.01 * float(rows.abs().max()))


def reach_of(config: PreTrainedConfig, layer: int, window: int | None) -> AttentionSpan:
    """The reach of a layer that passes `window` to its attention function. Only the config states sections."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds else None
    if kind is not None and (kind in ("sliding_attention", "hybrid_sliding")) != (window is not None):
        raise ModelRefused(f"attention layer {layer} has type {kind}, but uses a window of {window} tokens")
    stated: int | None = getattr(config, "sliding_window", None)
    if kind is None and window is None and stated and stated < getattr(config, "max_position_embeddings", 0):
        raise ModelRefused(f"sliding_window is {stated}, but attention layer {layer} uses no window")
    if kind != "chunked_attention":
        return AttentionSpan(window)
    section: int | None = getattr(config, "attention_chunk_size", None)
    if section is None:
        raise ModelRefused(f"attention layer {layer} has type {kind}, but the config has no attention_chunk_size")
    return AttentionSpan(section=section)


def load(folder: str, dtype: DtypeName, device: str, *, keeps_stored: bool = False) -> Model:
    """Loads the checkpoint in `folder`. With `keeps_stored`, quantized weights remain as stored where that is
    supported; otherwise all are dequantized. Raises ModelRefused with the reason when it cannot be served exactly.
    """
    config = read_config(folder)
    quantization = pop_quantization(config)
    try:
        check_weights(Path(folder), config)
        check_types(Path(folder), quantization)
        numbers = range(len(auto_classes(config)))
        if quantization is None:
            attempts = (_read(folder, config, dtype, device, number) for number in numbers)
        else:
            dtype = dtype_of(folder, config, dtype, quantization)
            kernel = load_kernel(device) if keeps_stored else None
            attempts = (_dequantize(folder, config, dtype, device, number, quantization, kernel) for number in numbers)
        module, report = next(attempts)
        if report["missing_keys"]:
            module, report = next(attempts, (module, report))
    except (ModelRefused, StartError):
        raise
    except Exception as error:  # any error in the files refuses the folder
        raise refusal(folder, error, config) from error
    check_complete(folder, report["missing_keys"], report["mismatched_keys"])
    return replace(prove(module, device), layouts=report.get("layouts", ()))


def check_complete(folder: str, missing: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Raises ModelRefused if a checkpoint lacks weights, or has some of another shape (name, stored, wanted)."""
    if names := sorted(missing)[:3]:
        raise ModelRefused(f"{folder} lacks weights of a causal language model: {names}")
    for name, stored, wanted in sorted(mismatched):
        raise ModelRefused(f"{folder}: {name} has shape {[*stored]}, but the config requires {[*wanted]}")


def _read(
    folder: str, config: PreTrainedConfig, dtype: DtypeName, device: str, number: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model that an auto class builds, and its report about the weights. The annotations of auto classes lack
    output_loading_info.
    """
    with large_blocks_apart(), loading_to_device(device):
        loader: Any = auto_classes(config)[number]
        return loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=hook.NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused by name
            **UNTRUSTED,
            **SAFE_WEIGHTS,
        )


def _dequantize(
    folder: str,
    config: PreTrainedConfig,
    dtype: DtypeName,
    device: str,
    number: int,
    quantization: Quantization,
    kernel: NativeQuantizedLinear | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The same with quantized weights, which are dequantized while they are read, unless `kernel` supports them."""
    module = build_on_meta(config, dtype, number)
    with large_blocks_apart(), loading_to_device(device):
        loaded = read_share(module, Path(folder), {}, Share.even(0, 1), module.dtype, quantization, kernel=kernel)
    return module, {
        "missing_keys": loaded.missing,
        "mismatched_keys": loaded.mismatched,
        "layouts": loaded.layouts,
    }


def build_on_meta(config: PreTrainedConfig, wanted: DtypeName, number: int = 0) -> PreTrainedModel:
    """Builds the model without numbers, on the meta device. If neither `wanted` nor the config names a dtype, it is
    float32.
    """
    named = config.dtype if wanted == "auto" else wanted
    dtype: torch.dtype = getattr(torch, str(named or torch.float32).removeprefix("torch."))
    with torch.device("meta"), no_init_weights():
        return auto_classes(config)[number].from_config(
            config, dtype=dtype, attn_implementation=hook.NAME, trust_remote_code=False
        )


def read_config(folder: str) -> PreTrainedConfig:
    """The config of the checkpoint in `folder`, ready for the hook. Raises ModelRefused."""
    hook.register()
    transformers_logging.disable_progress_bar()
    if not (Path(folder) / "config.json").is_file():
        raise ModelRefused(f"{folder} is not a model folder: it has no config.json")
    try:
        check_code(folder)
        config = AutoConfig.from_pretrained(folder, **UNTRUSTED)
        forget_code(config)
        check_config(config)
    except ModelRefused:
        raise
    except Exception as error:  # any error in the file refuses the folder
        raise refusal(folder, error) from error
    return config


def refusal(folder: str, error: Exception, config: PreTrainedConfig | None = None) -> ModelRefused:
    """The reason why transformers cannot build a model of `folder`, whose config is `config` if it could be read."""
    [key] = error.args if isinstance(error, KeyError) and len(error.args) == 1 else [None]
    if key == hook.NAME:
        return ModelRefused("the attention of this family cannot be replaced")
    reason = describe_error(error)
    field = None if config is None else _field_of(config.to_dict(), key)
    if field is not None:  # transformers looks up values of the config in tables
        reason = f"transformers does not know {field}: {key}"
    return ModelRefused(f"{folder} cannot be loaded as a causal language model: {reason}")


def _field_of(settings: dict[str, Any], value: Any) -> str | None:
    """The name of a setting, nested or not, whose value is the given string."""
    if not isinstance(value, str):
        return None
    for name, found in settings.items():
        if found == value:
            return name
        if isinstance(found, dict) and (nested := _field_of(found, value)) is not None:
            return nested
    return None


def check_code(folder: str) -> None:
    """Refuses a checkpoint whose type is defined only by its own code."""
    fields, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    kind = fields.get("model_type")
    if "auto_map" in fields and kind not in CONFIG_MAPPING:
        raise ModelRefused(f"{folder} has type {kind} and requires custom code, which Longleaf never runs")


def forget_code(part: Any) -> None:
    """Removes the references to code from a config and its parts. For parts, transformers asks on standard input
    whether to run the code, regardless of the options of the call.
    """
    fields: Any = vars(part) if isinstance(part, PreTrainedConfig) else part
    if isinstance(fields, dict):
        fields.pop("auto_map", None)
        for value in fields.values():
            forget_code(value)
    elif isinstance(fields, list | tuple):
        for value in fields:
            forget_code(value)


def auto_classes(config: PreTrainedConfig) -> list[type[AutoModelForCausalLM | AutoModelForImageTextToText]]:
    """The auto classes that may build the model of a config, in the order in which they are tried. Raises ModelRefused
    if none builds a causal language model.

    The causal language models of transformers do not include all vision-language models, though these contain one. For
    some, such as Emu3, the causal class does not find the text weights in a checkpoint of the whole model.
    """
    found = list[type[AutoModelForCausalLM | AutoModelForImageTextToText]]()
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found.append(AutoModelForCausalLM)
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
        found.append(AutoModelForImageTextToText)
    if not found:
        raise ModelRefused(f"transformers has no causal language model of type {config.model_type}")
    return found


def prove(module: PreTrainedModel, device: str, *, has_weights: bool = True) -> Model:
    """Makes a module ready to serve on `device`. Raises ModelRefused when it would not be exact. Without weights it
    remains unknown whether rows are mixed outside of attention.
    """
    check_causal(decoder_of(module))
    check_positions(decoder_of(module))
    module.eval().requires_grad_(False)
    module.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    latent.absorb(module)
    ropes, rotary = replace_rotary(decoder_of(module), module.config.get_text_config())
    mixers = replace_mixers(module, has_weights=has_weights)
    check_states(module.config.get_text_config(), mixers)
    found = preflight(module, device, mixers, has_weights=has_weights)
    if mixers.one_by_one:
        log.warning(
            "%s: rows of a sequence are computed one by one, which is slow, because the layer drops its state when it "
            "is given several",
            describe_layers(mixers.one_by_one),
        )
    if mixers.with_two_formulas:
        log.warning(
            "%s: transformers computes single rows by another formula than several; answers that are recomputed after "
            "a preemption or a loss may differ in the last digits",
            describe_layers(mixers.with_two_formulas),
        )
    return Model(
        module,
        found.layers,
        device,
        module.dtype,
        ropes,
        rotary,
        mixers=mixers if mixers.layers else None,
        ends_with_mixer=found.ends_with_mixer,
    )


def check_config(config: PreTrainedConfig) -> None:
    """Refuses configs with features that the hook cannot see: masks that transformers makes outside of attention, and
    other layer types.
    """
    text = config.get_text_config()
    found = sorted(LAYER_TYPES.keys() & set(getattr(text, "layer_types", None) or ()))
    if found:
        kinds = ", ".join(f"{kind} ({LAYER_TYPES[kind]})" for kind in found)
        raise ModelRefused(f"layers of type {kinds} are not supported")
    bidirectional = getattr(text, "use_bidirectional_attention", None) or False
    if bidirectional not in (False, "vision"):  # "vision" applies between the tokens of an image, which are not served
        raise ModelRefused(f"use_bidirectional_attention: {bidirectional} is not causal, only vision is supported")


def check_states(config: PreTrainedConfig, mixers: Mixers) -> None:
    """Refuses layers with a recurrent state, according to the config, that are no mixers."""
    kinds: list[str] = list(getattr(config, "layer_types", None) or [])
    stated = [layer for layer, kind in enumerate(kinds) if kind in WITH_STATES and layer not in mixers.layers]
    if stated:
        raise ModelRefused(
            f"{describe_layers(stated)} of type {kinds[stated[0]]}: the recurrent state is not in the cache where "
            "other classes keep it, which is not supported"
        )


def check_causal(module: nn.Module) -> None:
    """Refuses encoders that transformers also loads as causal language models: their attention sees later tokens.
    Refuses decoders that attend to an encoder, which is not present.
    """
    for name, part in module.named_modules():
        if any(word in name for word in CROSS_ATTENTION):
            raise ModelRefused(
                f"{type(module).__name__}: {name} attends to an encoder (cross-attention), which is not supported"
            )
        if getattr(part, "is_causal", True) is False:
            raise ModelRefused(f"{type(module).__name__}: {name} is not causal")


def check_positions(module: nn.Module) -> None:
    """Refuses RoBERTa and its descendants, whose first position is the one after the id of the padding token."""
    for name, part in module.named_modules():
        if hasattr(part, "create_position_ids_from_input_ids"):
            raise ModelRefused(
                f"{type(module).__name__}: {name} counts positions from the padding token, which is not supported"
            )


@torch.inference_mode()
def preflight(module: PreTrainedModel, device: str, mixers: Mixers | None = None, *, has_weights: bool = True) -> Probe:
    """Runs several tokens, each at several rows, as steps without sampling, and checks that every attention layer calls
    the hook, with equal queries, keys and values for equal tokens: some families ignore the hook silently, and some mix
    rows, or depend on their number, outside of attention. The decoder without its head must give the same result: the
    chunks of a prompt, and the steps of all ranks except rank 0, run only the decoder. Mixers return zeros, so they
    hide no dependence between rows. Returns the last probe.
    """
    mixers = mixers or Mixers()
    tokens = probe_ids(module, max(count for count, _ in PROBES), has_weights=has_weights)
    found: Probe | None = None
    for (num_tokens, num_rows), is_whole in itertools.product(PROBES, (True, False)):
        ids = [tokens[i % min(num_tokens, len(tokens))] for i in range(num_rows)]
        probe = run_probe(module, ids, device, mixers, is_whole=is_whole, has_weights=has_weights)
        _check_layers(module if is_whole else decoder_of(module), module.config.get_text_config(), probe, mixers)
        if found and probe.layers != found.layers:
            raise ModelRefused(
                f"{type(module).__name__} computes different attention over {num_rows} tokens than over fewer"
            )
        found = probe
    assert found is not None
    return found


def _check_layers(module: nn.Module, config: PreTrainedConfig, probe: Probe, mixers: Mixers) -> None:
    """Raises ModelRefused unless each layer attends, has a state, or mixes no tokens."""
    expected = config.num_hidden_layers
    kinds: list[str] = list(getattr(config, "layer_types", None) or [])
    without = {layer for layer, kind in enumerate(kinds) if kind in WITHOUT_ATTENTION}
    if mixers.layers and not kinds:
        without = mixers.layers.keys() - probe.layers.keys()
    if not probe.layers and mixers.layers:
        raise ModelRefused(f"{type(module).__name__}: no layer attends; models without attention are not served")
    if sorted(probe.layers) != [layer for layer in range(expected) if layer not in without] or not probe.layers:
        raise ModelRefused(
            f"{type(module).__name__}: {len(probe.layers)} of {expected} layers call the attention function that is "
            "replaced"
        )


def run_probe(
    module: PreTrainedModel,
    ids: Sequence[int],
    device: str,
    mixers: Mixers | None = None,
    *,
    is_whole: bool,
    has_weights: bool,
) -> Probe:
    """One forward pass of the preflight, with the head or without it; returns its probe. Raises ModelRefused."""
    probe = Probe(module.config.get_text_config(), ids, has_weights=has_weights)
    ids_T, positions_T = torch.tensor(ids, device=device), torch.ones(len(ids), dtype=torch.long, device=device)
    inputs = hook.arguments(probe.attend, ids_T, positions_T, has_offsets=asks_for_offsets(module))
    part, options = (module, {"logits_to_keep": ids_T[:0]}) if is_whole else (decoder_of(module), {})
    with contextlib.nullcontext() if mixers is None else mixers.use(probe.mix):
        forward_checked(part, {**inputs, **options})
    return probe


def probe_ids(module: PreTrainedModel, count: int, *, has_weights: bool = True) -> list[int]:
    """At most `count` token ids, and at least 2, that are neither padding nor special and whose embeddings are finite,
    non-zero and distinct. Without weights embeddings are not checked. Raises ModelRefused if there are no such ids.
    """
    config = module.config.get_text_config()
    special = special_ids(module.config) | special_ids(config)
    size: int = config.vocab_size
    spread = (i * size // NUM_CANDIDATES for i in range(NUM_CANDIDATES))
    candidates = sorted({i for i in spread if i not in special})
    weight = getattr(module.get_input_embeddings(), "weight", None)
    if has_weights and isinstance(weight, Tensor):
        rows = weight[torch.tensor(candidates, device=weight.device)].float()
        usable = rows.isfinite().all(dim=1) & rows.any(dim=1)
        retained = list[int]()
        for i in usable.nonzero().flatten().tolist():
            if not any(torch.equal(rows[i], rows[other]) for other in retained):
                retained.append(i)
        candidates = [candidates[i] for i in retained]
    if len(candidates) < 2:
        raise ModelRefused("the embeddings of its tokens are zero, identical or not finite")
    step = max(1, len(candidates) // count)
    return candidates[::step][:count]


def special_ids(config: PreTrainedConfig) -> set[int]:
    """The ids with a special meaning in a config: padding, begin, end, images."""
    named = [value for name, value in config.to_dict().items() if "token_id" in name or "token_index" in name]
    listed = [item for value in named for item in (value if isinstance(value, list) else [value])]
    return {item for item in listed if isinstance(item, int)}


def decoder_of(module: PreTrainedModel) -> nn.Module:
    """The text layers without their head and without the vision part. The lookup of transformers does not find those of
    Llama 4, and returns the output layer of ModernBERT, which is called `decoder`.
    """
    decoder = module.get_decoder()
    return module.model if decoder in (module, module.get_output_embeddings()) else decoder


def asks_for_offsets(module: PreTrainedModel) -> bool:
    """Whether layers ask a cache for the start position of their rows: Llama 4, for its temperature."""
    return getattr(module.config.get_text_config(), "attn_temperature_tuning", False)


def forward_checked(module: nn.Module, inputs: dict[str, Any]) -> Any:
    """One forward pass with a step's handle. Raises ModelRefused if the model cannot run it."""
    try:
        return module(**inputs)
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"{type(module).__name__} cannot run on such steps: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """The first line of an error, with the following ones as long as a line ends with a colon, as in validation
    errors.
    """
    if isinstance(error, KeyError):  # its text is the repr of the key, which may be a sentence
        key = str(error.args[0]) if error.args else ""
        return key if " " in key else f"KeyError: {key}"
    found = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        found = f"{found} {line}".strip()
        if not found.endswith(":"):
            break
    return found or type(error).__name__
