"""The rules by which the weights of a model are divided over ranks. They are derived from a model without weights.

- Linear layers are divided by outputs. Layers that receive the very same tensor share one exchange.
- Two linear layers with only elementwise operations between them (an MLP) are divided by the width between them, and
  need one sum. `model.tp_plan` of transformers names them; a family without a plan is served by the first rule.
- Experts are divided by the width of each expert, so that the work of all ranks is equal for any routing.
- The embedding and the head are divided by words.
- Norms, routers, sinks and narrow layers are on every rank.

A layer must run its `forward` in every pass of the preflight, with all rows: some families use the weights of a layer
directly, and a separate module of an expert may receive no rows on some ranks, for which the others would wait. Pairs,
experts and embeddings are tried on random weights of a small width before they are divided.
"""

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from workers.model import model as models
from workers.model.meta_model import Outline, StretchedProducts
from workers.model.mixers import Mixers
from workers.model.sharded_layers import without_weightless
from workers.model.weight_shares import Cut, Share, take

MIN_OUTPUTS = 32
"""Layers with fewer outputs, such as gates and routers, are on every rank."""
MIN_GROWTH = 1 / 16
"""Least number of outputs of a group per input: narrower ones are not worth an exchange."""
TRIED_WIDTH, TRIED_ROWS = 16, 5
"""Width and number of rows with which pairs, experts and embeddings are tried."""
EXPERT_ALIGNMENT = 8
"""Slices of experts have a multiple of this width: rows of grouped products begin at multiples of 16 bytes."""
TOLERANCE = 1e-4
"""Largest difference in a trial, relative to the largest value; random weights of a wrong rule give more than 0.1."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """Linear layers that are divided by the width between them."""

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class SlicedExperts:
    """A module of experts, and the parameters of the module that are divided."""

    name: str
    num_experts: int
    """The experts that have weights."""
    cuts: dict[str, Cut]
    added_once: tuple[str, ...]
    """Biases of the outputs, which one share adds."""


@dataclass(frozen=True, slots=True)
class LayerExchanges:
    """Exchanges of the sharded layers of a model in one decode step, as counted in the preflight."""

    gathers: int
    """Gathers of the outputs of linear layers, the head included."""
    sums: int
    """Sums of the addends of pairs, experts and embeddings."""

    @property
    def total(self) -> int:
        return self.gathers + self.sums


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The division of the weights of a model, by the names of its modules."""

    groups: tuple[tuple[str, ...], ...]
    """Linear layers divided by outputs; those of a group share an exchange."""
    pairs: tuple[Pair, ...]
    experts: tuple[SlicedExperts, ...]
    embeddings: tuple[str, ...]
    cuts: dict[str, Cut]
    """The divided parameters, by name. All others are on every rank."""
    exchanges: LayerExchanges


def plan_weights(outline: Outline, num_shares: int) -> WeightPlan:
    """The division of a model into shares. Raises ModelRefused if the preflight refuses the model."""
    return _Planner(outline, num_shares).plan()


def align_pairs(plan: WeightPlan, units: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> WeightPlan:
    """The same division with bounds of the widths of pairs at multiples of the units, by the name of a second weight:
    quantized weights are divided between groups of inputs.
    """
    cuts = dict(plan.cuts)
    for pair in plan.pairs:
        output = f"{pair.output}.weight"
        unit = units.get(output, 1)
        if shapes[output][cuts[output].dim] % unit:
            continue
        for name, cut in plan.cuts.items():
            if name.rpartition(".")[0] in (*pair.inputs, pair.output):
                cuts[name] = replace(cut, unit=unit)
    return replace(plan, cuts=cuts)


def share_bytes(outline: Outline, plan: WeightPlan, share: Share, stored: Mapping[str, float] | None = None) -> int:
    """Bytes of the parameters that a rank holds. `stored`: bytes per number of parameters that remain quantized."""
    others = {name: one for name, one in outline.parameters.items() if name not in plan.cuts}
    everywhere = (round(one.numel() * (stored or {}).get(name, one.itemsize)) for name, one in others.items())
    return sum(everywhere) + sum(divided_bytes(outline, plan, share, stored))


def divided_bytes(
    outline: Outline, plan: WeightPlan, share: Share, stored: Mapping[str, float] | None = None
) -> list[int]:
    """Bytes of a rank's share of each divided parameter; tied parameters once. `stored` as above."""
    divided = {name: one for name, one in outline.parameters.items() if name in plan.cuts}
    counts = {name: prod(plan.cuts[name].shape(tuple(one.shape), share)) for name, one in divided.items()}
    return [round(counts[name] * (stored or {}).get(name, one.itemsize)) for name, one in divided.items()]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The calls of modules in one forward pass, with their inputs, which stay alive so that identities are unique."""

    num_rows: int
    is_whole: bool
    calls: list[tuple[nn.Module, tuple[Any, ...]]]


class _Planner:
    def __init__(self, outline: Outline, num_shares: int) -> None:
        self._module: PreTrainedModel = outline.model.module
        self._names = outline.modules
        self._parts = {name: part for part, name in outline.modules.items()}
        self._num_shares = num_shares
        # mixers run no layer of theirs here, so each rank holds all of their weights
        mixers = outline.model.mixers
        self._passes = _record_passes(self._module, mixers, [part for part in self._names if _is_candidate(part)])
        self._head: Any = self._module.get_output_embeddings()
        regular = {part for part in self._names if _is_candidate(part) and self._is_regular(part)}
        kinds = {self._kind(part) for part in self._names if _is_candidate(part) and part not in regular}
        self._regular = {part for part in regular if self._kind(part) not in kinds}

    def plan(self) -> WeightPlan:
        pairs = list(self._pairs())
        paired = {name for pair in pairs for name in (*pair.inputs, pair.output)}
        groups = list(self._groups(paired))
        experts = [found for part in self._names if is_experts(part) and (found := self._experts(part))]
        embeddings = [self._names[part] for part in self._names if self._can_cut_embedding(part)]
        self._untie(groups, embeddings)
        cuts = {f"{one.name}.{leaf}": cut for one in experts for leaf, cut in one.cuts.items()}
        cuts |= {f"{name}.weight": Cut(0) for name in embeddings}
        for name in itertools.chain.from_iterable(groups):
            cuts |= self._linear_cuts(name, by_outputs=True)
        for pair in pairs:
            for name in pair.inputs:
                cuts |= self._linear_cuts(name, by_outputs=True)
            cuts |= self._linear_cuts(pair.output, by_outputs=False)
        sums = [*(pair.output for pair in pairs), *(one.name for one in experts), *embeddings]
        exchanges = LayerExchanges(self._num_calls(names[0] for names in groups), self._num_calls(sums))
        return WeightPlan(tuple(groups), tuple(pairs), tuple(experts), tuple(embeddings), cuts, exchanges)

    def _num_calls(self, names: Iterable[str]) -> int:
        """The number of calls of these modules in a pass that includes the head."""
        whole = next(one for one in self._passes if one.is_whole)
        return sum(called is self._parts[name] for name in names for called, _ in whole.calls)

    def _is_regular(self, part: nn.Module) -> bool:
        """Whether a module is called in every pass, with all rows."""
        if part is self._head:
            return True
        for one in self._passes:
            inputs = [given for called, given in one.calls if called is part]
            if not inputs or any(_num_rows(part, given) != one.num_rows for given in inputs):
                return False
        return True

    def _kind(self, part: nn.Module) -> str:
        """The name of a module with all numbers but that of its layer removed: alike for the experts of a layer."""
        first, *others = self._names[part].split(".")
        found, has_layer = [first], False
        for word in others:
            found.append("*" if word.isdigit() and has_layer else word)
            has_layer = has_layer or word.isdigit()
        return ".".join(found)

    def _linear_cuts(self, name: str, *, by_outputs: bool) -> dict[str, Cut]:
        layer: Any = self._parts[name]
        is_transposed = isinstance(layer, Conv1D)
        cuts = {f"{name}.weight": Cut(0 if by_outputs != is_transposed else 1)}
        if by_outputs and layer.bias is not None:
            cuts[f"{name}.bias"] = Cut(0)
        return cuts

    # --- linear layers ---

    def _pairs(self) -> Iterator[Pair]:
        """The pairs of the plan of transformers, if only elementwise operations are between them."""
        styles: dict[str, str] = dict(self._module.tp_plan or {})
        for parent, name in self._names.items():
            generic = ".".join("*" if word.isdigit() else word for word in name.split("."))
            layers = {leaf: part for leaf, part in parent.named_children() if type(part) is nn.Linear}
            inputs = [leaf for leaf in layers if styles.get(f"{generic}.{leaf}") == "colwise"]
            outputs = [leaf for leaf in layers if styles.get(f"{generic}.{leaf}") == "rowwise"]
            if not inputs or len(outputs) != 1 or not all(layers[leaf] in self._regular for leaf in inputs + outputs):
                continue
            width = layers[outputs[0]].in_features
            if width < MIN_OUTPUTS or any(layers[leaf].out_features != width for leaf in inputs):
                continue
            if is_elementwise(parent, inputs, outputs[0]):
                yield Pair(tuple(f"{name}.{leaf}" for leaf in inputs), f"{name}.{outputs[0]}")

    def _groups(self, excluded: set[str]) -> Iterator[tuple[str, ...]]:
        """The other linear layers, grouped by their input."""
        layers = [part for part in self._regular if _is_linear(part) and self._names[part] not in excluded]
        layers = [part for part in layers if _num_outputs(part) >= MIN_OUTPUTS]
        done = set[nn.Module]()
        for part in sorted(layers, key=list(self._names).index):
            if part in done:
                continue
            group = [one for one in self._alike(part) if one in layers] or [part]
            done.update(group)
            if sum(map(_num_outputs, group)) >= MIN_GROWTH * _num_inputs(part):
                yield tuple(self._names[one] for one in group)

    def _alike(self, part: nn.Module) -> list[nn.Module]:
        """The layers that receive the same tensor as `part` in every pass, in the order of their calls."""
        found = [self._receivers(one, part) for one in self._passes]
        is_same = all(receivers == found[0] for receivers in found) and found[0].count(part) == 1
        return found[0] if is_same else [part]

    @staticmethod
    def _receivers(one: _Pass, part: nn.Module) -> list[nn.Module]:
        inputs = {id(given[0]) for called, given in one.calls if called is part}
        found = [called for called, given in one.calls if id(given[0]) in inputs and _is_linear(called)]
        return found if len(inputs) == 1 and len(set(found)) == len(found) else []

    # --- embeddings and experts ---

    def _can_cut_embedding(self, part: nn.Module) -> bool:
        if part not in self._regular or not isinstance(part, nn.Embedding):
            return False
        return part.num_embeddings >= max(MIN_OUTPUTS, self._num_shares) and is_lookup(part)

    def _untie(self, groups: list[tuple[str, ...]], embeddings: list[str]) -> None:
        """Keeps a tied embedding and its head on every rank unless both are divided."""
        words = self._module.get_input_embeddings()
        if self._head is None or getattr(words, "weight", None) is not self._head.weight:
            return
        head, name = (self._names[self._head],), self._names[words]
        if (head in groups) != (name in embeddings):
            groups[:] = [group for group in groups if group != head]
            embeddings[:] = [one for one in embeddings if one != name]

    def _experts(self, part: nn.Module) -> SlicedExperts | None:
        calls = [given for one in self._passes for called, given in one.calls if called is part]
        name = self._names[part]
        for cuts in _layouts(part, calls[0][0].shape[-1], self._num_shares) if calls else ():
            once = tuple(leaf for leaf, _ in part.named_parameters(recurse=False) if leaf not in cuts)
            if are_addends(part, cuts, once, calls[0]):
                return SlicedExperts(name, len(part.get_parameter("down_proj")), cuts, once)
        log.warning("weights: all ranks hold %s, because its experts cannot be divided", name)
        return None


def _is_candidate(part: nn.Module) -> bool:
    return _is_linear(part) or isinstance(part, nn.Embedding) or is_experts(part)


def _is_linear(part: nn.Module) -> bool:
    return type(part) in (nn.Linear, Conv1D)


def is_experts(part: nn.Module) -> bool:
    """Whether the parameters of a module are those of experts, as transformers stacks them: [experts, ..., ...]."""
    down = part._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def _num_outputs(layer: Any) -> int:
    return layer.nf if isinstance(layer, Conv1D) else layer.out_features


def _num_inputs(layer: Any) -> int:
    return layer.nx if isinstance(layer, Conv1D) else layer.in_features


def _num_rows(part: nn.Module, given: tuple[Any, ...]) -> int:
    if not given or not isinstance(given[0], Tensor):
        return -1
    if isinstance(part, nn.Embedding):
        return given[0].numel()
    rows = given[0].shape[:-1].numel()
    # without routing each expert has all rows
    return rows // len(part.get_parameter("down_proj")) if is_experts(part) and len(given) == 1 else rows


@torch.inference_mode()
def _record_passes(module: PreTrainedModel, mixers: Mixers | None, parts: Sequence[nn.Module]) -> list[_Pass]:
    """The calls of parts in the forward passes of the preflight."""
    tokens = models.probe_ids(module, max(count for count, _ in models.PROBES), has_weights=False)
    passes = list[_Pass]()
    for (_, num_rows), is_whole in itertools.product(models.PROBES, (True, False)):
        ids = [tokens[i % len(tokens)] for i in range(num_rows)]
        found = _Pass(num_rows, is_whole, [])
        with _recording(parts, found), StretchedProducts():
            models.run_probe(module, ids, "cpu", mixers, is_whole=is_whole, has_weights=False)
        passes.append(found)
    return passes


@contextmanager
def _recording(parts: Sequence[nn.Module], found: _Pass) -> Iterator[None]:
    def record(part: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.calls.append((part, (*given, *options.values())))

    handles = [part.register_forward_pre_hook(record, with_kwargs=True) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reached(Exception):
    """Ends a forward pass at a layer, and carries the rows that reach it."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


class _End(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        raise _Reached(rows)


@torch.inference_mode()
def is_elementwise(parent: nn.Module, inputs: Sequence[str], output: str) -> bool:
    """Whether the rows that reach the layer `output` of a module depend, at each index, only on the outputs of the
    layers `inputs` at that index: then a part of the width gives a part of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    layers = {leaf: parent.get_submodule(leaf) for leaf in inputs}
    weights = {
        leaf: torch.randn(TRIED_WIDTH, _num_inputs(layer), generator=generator) for leaf, layer in layers.items()
    }
    x = torch.randn(1, TRIED_ROWS, next(iter(weights.values())).shape[1], generator=generator)

    def reaching(start: int, end: int) -> Tensor:
        small = {leaf: _linear(weight[start:end]) for leaf, weight in weights.items()}
        try:
            _with_parts(parent, modules={**small, output: _End()})(x)
        except _Reached as reached:
            return reached.rows
        raise ValueError("the output is not reached")

    half = TRIED_WIDTH // 2
    try:
        whole, parts = reaching(0, TRIED_WIDTH), (reaching(0, half), reaching(half, TRIED_WIDTH))
    except Exception:  # it depends on the width, or on more than the rows
        return False
    return _is_close(torch.cat(parts, dim=-1), whole)


@torch.inference_mode()
def is_lookup(embedding: nn.Embedding) -> bool:
    """Whether the output of an embedding for an id depends only on the row of weights with this index."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(TRIED_WIDTH, embedding.embedding_dim, generator=generator)
    half = TRIED_WIDTH // 2
    plain = _with_parts(embedding, parameters={"weight": weight}, padding_idx=None)
    part = _with_parts(embedding, parameters={"weight": weight[half:]}, padding_idx=None)
    try:
        return _is_close(part(torch.arange(half)), plain(torch.arange(half, TRIED_WIDTH)))
    except Exception:  # ids are offset, or accompanied by other arguments
        return False


@torch.inference_mode()
def are_addends(experts: nn.Module, cuts: dict[str, Cut], once: Sequence[str], call: tuple[Any, ...]) -> bool:
    """Whether the outputs of experts are sums of those of their slices. `call` holds arguments of their shapes."""
    generator = torch.Generator().manual_seed(0)
    full = dict[str, Tensor]()
    narrowest = min(parameter.shape[cuts[name].dim] for name, parameter in experts.named_parameters() if name in cuts)
    for name, parameter in experts.named_parameters(recurse=False):
        shape = list(parameter.shape)
        if name in cuts:
            shape[cuts[name].dim] = shape[cuts[name].dim] // narrowest * TRIED_WIDTH
        full[name] = torch.randn(shape, generator=generator)
    num_experts = len(full["down_proj"])
    hidden, *routing = (
        torch.randn(one.shape, generator=generator)
        if one.is_floating_point()
        else torch.randint(max(map(len, full.values())), one.shape, generator=generator)
        for one in call
    )
    try:
        whole = _with_parts(experts, parameters=full)(hidden, *routing)
        total = torch.zeros_like(whole)
        for index in range(2):
            share = Share.even(index, 2)
            own = {name: take(one, cuts[name], share) if name in cuts else one for name, one in full.items()}
            own |= {name: torch.zeros_like(full[name]) for name in once if not share.has_first}
            given = routing
            if routing and not share.has_first:
                ids, weights = routing
                given = [ids, without_weightless(ids, weights, num_experts)]
            total += _with_parts(experts, parameters=own)(hidden, *given)
    except Exception:  # it depends on the width, or has other arguments
        return False
    return _is_close(total, whole)


def _layouts(experts: nn.Module, num_features: int, num_shares: int) -> Iterator[dict[str, Cut]]:
    """The ways in which the parameters of experts may be divided by width. The widths of a gate and a projection are
    one after the other, or alternate.
    """
    parameters = dict(experts.named_parameters(recurse=False))
    down = parameters["down_proj"]
    for dim in (dim for dim in (2, 1) if down.shape[3 - dim] == num_features):
        width = down.shape[dim]
        if width < EXPERT_ALIGNMENT * num_shares:
            continue
        for cut in ({"num_blocks": 2}, {"unit": 2}):
            cuts = {"down_proj": Cut(dim, least_alignment=EXPERT_ALIGNMENT)}
            for name, parameter in parameters.items():
                if name in ("down_proj", "down_proj_bias") or parameter.dim() not in (2, 3):
                    continue
                at = 1 if parameter.dim() == 2 else 3 - dim
                if parameter.shape[at] == 2 * width:
                    cuts[name] = Cut(at, **cut, least_alignment=EXPERT_ALIGNMENT)
                elif parameter.shape[at] == width:
                    cuts[name] = Cut(at, least_alignment=EXPERT_ALIGNMENT)
            yield cuts


def _with_parts(
    module: nn.Module,
    *,
    modules: dict[str, nn.Module] | None = None,
    parameters: dict[str, Tensor] | None = None,
    **attributes: Any,
) -> Any:
    """A shallow copy of a module with other submodules, parameters and attributes."""
    found = copy.copy(module)
    made = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in (parameters or {}).items()}
    found.__dict__ |= attributes
    found._modules = {**module._modules, **(modules or {})}
    found._parameters = {**module._parameters, **made}
    return found


def _linear(weight_OI: Tensor) -> nn.Linear:
    num_out, num_in = weight_OI.shape
    layer = nn.Linear(num_in, num_out, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
    return layer


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max()) and bool(expected.any())
