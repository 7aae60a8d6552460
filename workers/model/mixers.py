"""Layers with a recurrent state, such as gated delta net, KDA, Mamba and short convolutions: mixers.

A mixer of transformers computes the rows of one sequence in order, and keeps the sequence's state in a cache. Here each
mixer is replaced by one that passes its rows to the step (`workers.step.states`), which groups them by sequence and
runs the unchanged module with the state of each. Mixers are recognized by the methods of the cache that they call, not
by their class.

Before a model serves, each mixer computes random rows at once and in parts. A mixer whose results differ does not
continue from its state when it is given several rows, and receives them one by one from then on. Some compute a single
row by another formula than several; prompts are then computed with several, and answers with single rows, as by
`generate`.

Shape letters: B sequences, L rows of each, F features.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longleaf.errors import ModelRefused
from longleaf.kernels.cpu.recurrent import RecurrentPart, parts_tensor

CACHE_METHODS = ("update_conv_state", "update_recurrent_state")
"""Methods of a cache that store a state. A layer whose forward pass calls one of them is a mixer."""
CACHE_NAMES = ("cache_params", "past_key_values")
"""Names of the argument by which a mixer receives its cache."""
SEVERAL, SINGLE = (5, 4), (1,) * 9
"""Numbers of rows of the parts in which a mixer is tried."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest difference between results of the same rows at once and in parts, relative to the largest result. A state
that is dropped changes a result by its own size.
"""
ROUNDING = {**TOLERANCE, torch.float32: 2e-5}
"""As `TOLERANCE`, for single rows by the same formula: rounding changes the results of small models by up to 1.5e-6 in
float32, and the other formula of Nemotron-H by 3e-4. In 16 bits rounding hides it.
"""


class PartName(NamedTuple):
    """The name of a part of a state."""

    kind: str
    """`conv` or `recurrent`."""
    number: int


class StatePart(NamedTuple):
    """A part of the state that a mixer keeps for each sequence."""

    name: PartName
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: the dtype of the model."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the part in a model of this dtype."""
        return torch.Size(self.shape).numel() * (self.dtype or dtype).itemsize


class StateCache:
    """The states of B sequences in one mixer, in place of a cache of transformers. Without parts, the sequences begin.

    Mixers may change the tensors that they receive.
    """

    def __init__(self, parts: dict[PartName, Tensor] | None = None) -> None:
        """`parts`: tensors [B, ...]."""
        self.parts = parts or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(PartName("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(PartName("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keeps the last `conv_kernel_size` inputs of a convolution. Returns the new inputs, after those kept before;
        at the start of a sequence they are padded with zeros up to that number.
        """
        name = PartName("conv", state_idx)
        before = self.parts.get(name)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            padding = max(0, size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (padding, 0)) if padding else conv_states
        else:
            inputs = torch.cat([before, conv_states], dim=-1)
        self.parts[name] = inputs[..., -size:].clone()
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Keeps the state of a recurrence, in the dtype of the first one."""
        name = PartName("recurrent", state_idx)
        before = self.parts.get(name)
        self.parts[name] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return self.parts[name]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.parts)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class SequenceParts(NamedTuple):
    """The rows of a step by sequence, for compiled mixers."""

    table_P4: Tensor
    """See `longleaf.kernels.cpu.recurrent.parts_tensor`."""
    is_single_T: Tensor
    """Whether a row is the only one of its sequence and continues it, as in the decode steps of `generate`."""

    @classmethod
    def of(cls, parts: Sequence[RecurrentPart]) -> Self:
        """From the parts of all rows, in order."""
        is_single = [one.end - one.start == 1 and one.source >= 0 for one in parts for _ in range(one.start, one.end)]
        return cls(parts_tensor(parts), torch.tensor(is_single))


class Projected(NamedTuple):
    """The projections of rows in a compiled mixer."""

    gates: Tensor
    """[T, ...], for `CompiledMixer.finish`."""
    inputs: tuple[Tensor, ...]
    """Inputs of the recurrence, each [T, ...]."""


class CompiledMixer(Protocol):
    """Computes the rows of a step in a mixer with compiled kernels. Only `advance` depends on other rows."""

    dtype: torch.dtype
    """Of rows and results."""

    def project(self, rows_TF: Tensor) -> Projected: ...

    def advance(self, inputs: Sequence[Tensor], pools: Mapping[PartName, Tensor], parts: SequenceParts) -> Tensor:
        """The results [T, H, V] of the recurrence. States are read from slots of the pools, [slots, ...], and written
        to others.
        """
        ...

    def finish(self, found_THV: Tensor, gates: Tensor) -> Tensor:
        """The results [T, F] of the mixer for at least one row."""
        ...


class SequenceMixer(nn.Module):
    """A mixer whose rows the step groups by sequence."""

    def __init__(self, plain: nn.Module, layer: int, mixers: "Mixers") -> None:
        super().__init__()
        self.plain = plain
        self.layer = layer
        self.is_one_by_one = False
        """Whether rows of a sequence are computed one at a time."""
        self.has_two_formulas = False
        """Whether a single row has another result than as one of several, in the module of transformers."""
        self.parts: tuple[StatePart, ...] = ()
        self.compiled: CompiledMixer | None = None
        """Computes the rows of steps instead of `compute`, if present."""
        self._mixers = mixers
        self._cache_name = _cache_name(plain)
        self._returns_tuple = False

    def use_compiled(self, compiled: CompiledMixer) -> None:
        """Makes steps compute rows with `compiled`."""
        self.compiled = compiled

    def compute(self, rows_BLF: Tensor, cache: StateCache) -> Tensor:
        """The results [B, L, F] of the next rows of B sequences, whose states in `cache` advance."""
        if self.is_one_by_one and rows_BLF.shape[1] > 1:
            return torch.cat([self._compute(row_B1F, cache) for row_B1F in rows_BLF.split(1, dim=1)], dim=1)
        return self._compute(rows_BLF, cache)

    def _compute(self, rows_BLF: Tensor, cache: StateCache) -> Tensor:
        found = self.plain(rows_BLF, **{self._cache_name: cache})
        self._returns_tuple = isinstance(found, tuple)
        return found[0] if isinstance(found, tuple) else found

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        """As the module that it replaces, for one batch [1, T, F] of rows of any sequences; outside of steps, as that
        module.
        """
        if self._mixers.mix is None:
            return self.plain(hidden_states, *inputs, **options)
        if options.get("attention_mask") is not None:
            raise ModelRefused(f"layer {self.layer} masks the rows of its recurrent state, which is not supported")
        found = self._mixers.mix(self, hidden_states[0])[None]
        return (found, None) if self._returns_tuple else found


Mix = Callable[[SequenceMixer, Tensor], Tensor]
"""Computes the rows [T, F] of a step in a mixer."""


class Mixers:
    """The mixers of a model, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, SequenceMixer] = {}
        self.mix: Mix | None = None
        """Computes the rows of the current step; None: the model computes whole sequences, without a step."""

    @contextmanager
    def use(self, mix: Mix | None) -> Generator[None, None, None]:
        """Computes rows with `mix` in the body."""
        self.mix = mix
        try:
            yield
        finally:
            self.mix = None

    @property
    def one_by_one(self) -> list[int]:
        """The layers that compute the rows of a sequence one at a time."""
        return [layer for layer, mixer in self.layers.items() if mixer.is_one_by_one]

    @property
    def with_two_formulas(self) -> list[int]:
        """The layers in which a single row has another result than as one of several."""
        return [layer for layer, mixer in self.layers.items() if mixer.has_two_formulas]

    def parts(self) -> dict[int, tuple[StatePart, ...]]:
        """The parts of a sequence's state, by layer."""
        return {layer: mixer.parts for layer, mixer in self.layers.items()}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the state of one sequence, in a model of this dtype."""
        return sum(part.num_bytes(dtype) for parts in self.parts().values() for part in parts)


@torch.inference_mode()
def replace_mixers(model: PreTrainedModel, *, has_weights: bool = True) -> Mixers:
    """Replaces the mixers of a model, and tries each of them. Without weights, only the shapes of states are found.
    Raises ModelRefused.
    """
    mixers = Mixers()
    for name, plain in [*model.named_modules()]:
        if not _is_mixer(plain):
            continue
        layer: int = plain.layer_idx  # pyright: ignore[reportAssignmentType]
        if layer in mixers.layers:
            raise ModelRefused(f"layer {layer} has two recurrent states, which is not supported")
        mixer = mixers.layers[layer] = SequenceMixer(plain, layer, mixers)
        _try(mixer, model, has_weights=has_weights)
        model.set_submodule(name, mixer)
    return mixers


def _is_mixer(module: nn.Module) -> bool:
    """Whether the forward pass of a module stores a state in its cache."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return any(f".{method}(" in source for method in CACHE_METHODS)


def _cache_name(module: nn.Module) -> str:
    names = inspect.signature(module.forward).parameters
    found = [name for name in CACHE_NAMES if name in names]
    if len(found) != 1:
        raise ModelRefused(f"{type(module).__name__} has no cache for its recurrent state")
    return found[0]


def _try(mixer: SequenceMixer, model: PreTrainedModel, *, has_weights: bool) -> None:
    """Finds the parts of the state of a mixer, and whether it continues from its state when it is given several rows.
    Raises ModelRefused.
    """
    config, dtype, device = model.config.get_text_config(), model.dtype, next(mixer.plain.parameters()).device
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(SEVERAL) if has_weights else 1
    rows_BLF = torch.randn(2, num_rows, config.hidden_size, generator=generator).to(device, dtype)
    try:
        cache = StateCache()
        whole_BLF = mixer.compute(rows_BLF, cache)
        mixer.parts = tuple(_describe(name, tensor, dtype) for name, tensor in sorted(cache.parts.items()))
        if has_weights:
            mixer.is_one_by_one = not _continues(mixer, rows_BLF, whole_BLF, SEVERAL, TOLERANCE)
            mixer.has_two_formulas = not _continues(mixer, rows_BLF, whole_BLF, SINGLE, ROUNDING)
            if mixer.is_one_by_one and not _continues(mixer, rows_BLF, whole_BLF, SINGLE, TOLERANCE):
                raise ModelRefused(f"the recurrent state of layer {mixer.layer} does not determine its next results")
    except ModelRefused:
        raise
    except Exception as error:  # any error refuses the model
        raise ModelRefused(f"{type(mixer.plain).__name__}: its state is not supported: {error}") from error
    if not mixer.parts or whole_BLF.shape != rows_BLF.shape:
        raise ModelRefused(f"{type(mixer.plain).__name__}: its state is not supported together with its other results")


def _describe(name: PartName, tensor: Tensor, dtype: torch.dtype) -> StatePart:
    return StatePart(name, tuple(tensor.shape[1:]), None if tensor.dtype == dtype else tensor.dtype)


def _continues(
    mixer: SequenceMixer,
    rows_BLF: Tensor,
    whole_BLF: Tensor,
    sizes: Sequence[int],
    tolerances: dict[torch.dtype, float],
) -> bool:
    """Whether the results of rows in parts, first of both sequences and then of the second one, equal those at once."""
    tolerance = tolerances.get(rows_BLF.dtype, tolerances[torch.float32]) * float(whole_BLF.abs().max())
    both, second = StateCache(), StateCache()
    found = (
        torch.cat([mixer.compute(part, cache) for part in rows.split(sizes, dim=1)], dim=1)
        for rows, cache in ((rows_BLF, both), (rows_BLF[1:], second))
    )
    return all(
        torch.allclose(results, whole, rtol=0, atol=tolerance)
        for results, whole in zip(found, (whole_BLF, whole_BLF[1:]), strict=True)
    )


def describe_layers(layers: Iterable[int]) -> str:
    """Layers as text, for example "layers 0, 2 and 3"."""
    *others, last = map(str, layers)
    return f"layers {', '.join(others)} and {last}" if others else f"layer {last}"
