"""Mixers whose convolution and recurrence are compiled: gated delta nets, KDA and Mamba-2 on CPU ranks.

The projections before and after them, and the norms, are the modules of the plain mixer. A mixer is recognized by the
names of its parts, and compared with the plain module before it is used: one with other results stays plain. Rows of
many sequences are computed in one call, with states where the pool has them. The bits of a row do not depend on other
sequences. The recurrence is computed in float32, also in models of 16 bits.

Shape letters: T rows, F features, C channels of the convolution, K inputs that it keeps, H heads, D numbers of a key, V
of a value.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longleaf.kernels.cpu.recurrent import Convolution, NativeRecurrence, RecurrentPart
from workers.model.mixers import (
    Mixers,
    PartName,
    Projected,
    SequenceMixer,
    SequenceParts,
    StateCache,
    StatePart,
    describe_layers,
)

ACTIVATIONS = ("silu", "swish")
DTYPES = (torch.float32, torch.bfloat16)
CONV, RECURRENT = PartName("conv", 0), PartName("recurrent", 0)
WHOLE, CONTINUED = (9,), (5, 1, 1, 2)
"""Numbers of rows of the parts in which a mixer is compared: of a sequence that begins, and of another one."""
TOLERANCE = 5e-5
"""Largest difference between results, relative to the largest one: see `workers.model.mixers.ROUNDING`."""

log = logging.getLogger(__name__)


class DeltaRuleMixer:
    """A gated delta net, whose state has one decay, or one for each number of a key (KDA)."""

    def __init__(self, plain: Any, kernels: NativeRecurrence, project: Callable[[Any, Tensor], Projected]) -> None:
        self._plain = plain
        self._kernels = kernels
        self._project = project
        self._convolution = convolution_of(plain)
        self.dtype: torch.dtype = plain.conv1d.weight.dtype
        self._norm, self._out = ("norm", "out_proj") if hasattr(plain, "out_proj") else ("o_norm", "o_proj")
        self._key_heads: int = getattr(plain, "num_k_heads", None) or plain.num_heads

    def project(self, rows_TF: Tensor) -> Projected:
        """Inputs are the channels [T, C], the logarithms of decays, [T, H] or [T, H, D], and the steps [T, H]."""
        return self._project(self._plain, rows_TF)

    def advance(self, inputs: Sequence[Tensor], pools: Mapping[PartName, Tensor], parts: SequenceParts) -> Tensor:
        """Implements `workers.model.mixers.CompiledMixer`."""
        x_TC, log_decays, steps_TH = (each.float() for each in inputs)
        own, decays = (pools[CONV], pools[RECURRENT]), log_decays.exp()
        return self._kernels.delta_rule(x_TC, self._convolution, own, parts.table_P4, decays, steps_TH, self._key_heads)

    def finish(self, found_THV: Tensor, gates: Tensor) -> Tensor:
        """Implements `workers.model.mixers.CompiledMixer`."""
        num_rows, _, num_values = found_THV.shape
        norm, out = getattr(self._plain, self._norm), getattr(self._plain, self._out)
        normed = norm(found_THV.reshape(-1, num_values).to(gates.dtype), gates.reshape(-1, num_values))
        return out(normed.view(num_rows, -1))


class ScanMixer:
    """Mamba-2. Several rows limit the time steps; a single row after others does not, as in transformers."""

    def __init__(self, plain: Any, kernels: NativeRecurrence) -> None:
        self._plain = plain
        self._kernels = kernels
        self._convolution = convolution_of(plain)
        self.dtype: torch.dtype = plain.conv1d.weight.dtype
        self._limits: tuple[float, float] = tuple(plain.time_step_limit)
        self._is_limited = self._limits[0] > 0 or self._limits[1] < float("inf")
        self._skips_H = plain.D.float().contiguous()

    def project(self, rows_TF: Tensor) -> Projected:
        """Inputs are the channels [T, C] and the time steps [T, H]."""
        plain = self._plain
        if hasattr(plain, "mup_vector"):
            projected = plain.in_proj(rows_TF * plain.ssm_in_multiplier) * plain.mup_vector.flatten()
        else:
            projected = plain.in_proj(rows_TF)
        sizes = [plain.intermediate_size, plain.conv_dim, plain.num_heads]
        gates, x_TC, steps_TH = projected.split(sizes, dim=-1)
        return Projected(gates, (x_TC, functional.softplus(steps_TH + plain.dt_bias)))

    def advance(self, inputs: Sequence[Tensor], pools: Mapping[PartName, Tensor], parts: SequenceParts) -> Tensor:
        """Implements `workers.model.mixers.CompiledMixer`."""
        plain, (x_TC, steps_TH) = self._plain, (each.float() for each in inputs)
        if self._is_limited:
            steps_TH = torch.where(parts.is_single_T[:, None], steps_TH, steps_TH.clamp(*self._limits))
        own, decays_TH = (pools[CONV], pools[RECURRENT]), torch.exp(-steps_TH * plain.A_log.float().exp())
        return self._kernels.scan(
            x_TC, self._convolution, own, parts.table_P4, decays_TH, steps_TH, self._skips_H, plain.n_groups
        )

    def finish(self, found_THV: Tensor, gates: Tensor) -> Tensor:
        """Implements `workers.model.mixers.CompiledMixer`."""
        plain, found = self._plain, found_THV.flatten(1)
        is_normed = getattr(plain, "mamba_rms_norm", True)
        normed = plain.norm(found, gates) if is_normed else found * functional.silu(gates)
        return plain.out_proj(normed.to(gates.dtype))


def convolution_of(plain: Any) -> Convolution:
    """The convolution of a plain mixer."""
    bias = None if plain.conv1d.bias is None else plain.conv1d.bias.float()
    return Convolution(plain.conv1d.weight[:, 0].T.float().contiguous(), bias)


def _log_decays(plain: Any, decays_TH: Tensor) -> Tensor:
    return -plain.A_log.float().exp() * functional.softplus(decays_TH.float() + plain.dt_bias)


def _project_qwen3_5(plain: Any, rows_TF: Tensor) -> Projected:
    log_decays_TH, steps_TH = _log_decays(plain, plain.in_proj_a(rows_TF)), plain.in_proj_b(rows_TF).sigmoid()
    return Projected(plain.in_proj_z(rows_TF), (plain.in_proj_qkv(rows_TF), log_decays_TH, steps_TH))


def _project_qwen3_next(plain: Any, rows_TF: Tensor) -> Projected:
    """Projections are interleaved by key head."""
    found = plain.fix_query_key_value_ordering(plain.in_proj_qkvz(rows_TF)[None], plain.in_proj_ba(rows_TF)[None])
    query, key, value, gates, steps_TH, decays_TH = (each[0] for each in found)
    x_TC = torch.cat([each.flatten(1) for each in (query, key, value)], dim=1)
    return Projected(gates, (x_TC, _log_decays(plain, decays_TH), steps_TH.sigmoid()))


def _project_separately(plain: Any, rows_TF: Tensor) -> Tensor:
    return torch.cat([plain.q_proj(rows_TF), plain.k_proj(rows_TF), plain.v_proj(rows_TF)], dim=1)


def _project_olmo(plain: Any, rows_TF: Tensor) -> Projected:
    steps_TH = plain.b_proj(rows_TF).sigmoid() * (2.0 if plain.allow_neg_eigval else 1.0)
    log_decays_TH = _log_decays(plain, plain.a_proj(rows_TF))
    return Projected(plain.g_proj(rows_TF), (_project_separately(plain, rows_TF), log_decays_TH, steps_TH))


def _project_kda(plain: Any, rows_TF: Tensor) -> Projected:
    gates = plain.g_proj(rows_TF) if hasattr(plain, "g_proj") else plain.g_b_proj(plain.g_a_proj(rows_TF))
    log_decays_THD, steps_TH = plain.forget_gate(rows_TF[None])[0], plain.b_proj(rows_TF).sigmoid()
    return Projected(gates, (_project_separately(plain, rows_TF), log_decays_THD, steps_TH))


DELTA_RULES: dict[tuple[str, ...], Callable[[Any, Tensor], Projected]] = {
    ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias", "norm", "out_proj"): _project_qwen3_5,
    ("in_proj_qkvz", "in_proj_ba", "A_log", "dt_bias", "norm", "out_proj"): _project_qwen3_next,
    ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "A_log", "dt_bias", "o_norm", "o_proj"): _project_olmo,
    ("q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_proj", "o_norm", "o_proj"): _project_kda,
    ("q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj"): _project_kda,
}
"""Projections of a gated delta net by the names of its parts."""
SCAN = ("in_proj", "A_log", "D", "dt_bias", "n_groups", "time_step_limit", "norm", "out_proj")


@torch.inference_mode()
def compile_mixers(layers: Mapping[int, SequenceMixer], num_features: int, kernels: NativeRecurrence) -> None:
    """Makes mixers, whose rows have `num_features`, compute the rows of steps with compiled kernels, where they are in
    CPU memory, their form is known, and the results are those of the plain module.
    """
    wrong = list[int]()
    for layer, mixer in layers.items():
        compiled = _make(mixer.plain, mixer, kernels)
        if compiled is not None and _is_alike(mixer, num_features, kernels):
            mixer.use_compiled(compiled)
        elif compiled is not None:
            wrong.append(layer)
    if wrong:
        log.warning(
            "%s: results of the compiled kernels differ from those of transformers, whose module is used instead "
            "(slower)",
            describe_layers(wrong),
        )


def _make(plain: Any, mixer: SequenceMixer, kernels: NativeRecurrence) -> DeltaRuleMixer | ScanMixer | None:
    """The compiled form of the plain module of a mixer; None if its form, its sizes or its types are not supported."""
    parts = {part.name: part.shape for part in mixer.parts}
    types = {(each.dtype, each.is_cpu) for each in plain.parameters()}
    if not types <= {(dtype, True) for dtype in DTYPES} or not hasattr(plain, "conv1d") or mixer.is_one_by_one:
        return None
    if parts.keys() != {CONV, RECURRENT} or len(parts[RECURRENT]) != 3:
        return None
    stored = {part.name: part.dtype or plain.conv1d.weight.dtype for part in mixer.parts}
    if stored[CONV] not in DTYPES or stored[RECURRENT] != torch.float32:
        return None
    if getattr(plain, "activation", None) not in ACTIVATIONS or not kernels.can_run(
        *parts[CONV], *parts[RECURRENT][1:]
    ):
        return None
    for names, project in DELTA_RULES.items():
        if _has(plain, names):
            return DeltaRuleMixer(plain, kernels, project)
    return ScanMixer(plain, kernels) if _has(plain, SCAN) else None


def _has(plain: nn.Module, names: Sequence[str]) -> bool:
    return all(hasattr(plain, name) for name in names)


def _is_alike(mixer: SequenceMixer, num_features: int, kernels: NativeRecurrence) -> bool:
    """Whether the results and the last states of two sequences are those of the plain module, in float32, in which
    rounding hides no other formula. Any error counts as another result: the form of the module is a guess.
    """
    try:
        is_float32 = all(each.dtype == torch.float32 for each in mixer.plain.parameters())
        plain = mixer.plain if is_float32 else copy.deepcopy(mixer.plain).float()
        compiled = _make(plain, mixer, kernels)
        return compiled is not None and _compare(
            SequenceMixer(plain, mixer.layer, Mixers()), mixer.parts, compiled, num_features
        )
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        log.debug("layer %d: %s", mixer.layer, error)
        return False


def _compare(
    mixer: SequenceMixer, described: Sequence[StatePart], compiled: DeltaRuleMixer | ScanMixer, num_features: int
) -> bool:
    """Whether a mixer and its compiled form, both float32, have the same results and states."""
    generator = torch.Generator().manual_seed(0)
    rows_TF = torch.randn(sum(WHOLE) + sum(CONTINUED), num_features, generator=generator)
    pools = {part.name: torch.zeros(2, *part.shape) for part in described}
    wanted, states, parts, start = list[Tensor](), list[StateCache](), list[RecurrentPart](), 0
    for slot, sizes in enumerate((WHOLE, CONTINUED)):
        cache = StateCache()
        for i, size in enumerate(sizes):
            wanted.append(mixer.compute(rows_TF[None, start : start + size], cache)[0])
            parts.append(RecurrentPart(start, start + size, slot if i else -1, slot))
            start += size
        states.append(cache)
    gates, inputs = compiled.project(rows_TF)
    found_TF = compiled.finish(compiled.advance(inputs, pools, SequenceParts.of(parts)), gates)
    pairs = [(found_TF, torch.cat(wanted))]
    pairs += [(pools[name], torch.cat([one.parts[name] for one in states])) for name in pools]
    return all(one.shape == other.shape and _is_close(one, other) for one, other in pairs)


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
