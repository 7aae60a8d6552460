"""Attention weights of dense float64 attention, and its output with hidden positions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from longleaf.rank_protocol.step import NUM_OTHER_SHARES, Attention, Positions, Spans
from tests.support.golden.plain import load_plain

Ids = tuple[int, ...]


class Shares(NamedTuple):
    """The attribution that a step reports for one sequence."""

    means: Tensor
    largest: Tensor
    heads: Tensor


def unpack_attention(attention: Attention) -> Shares:
    types = (np.float32, np.float32, np.int32)
    return Shares(
        *(
            torch.from_numpy(np.frombuffer(b, t).copy())
            for b, t in zip(msgspec.structs.astuple(attention), types, strict=True)
        )
    )


class Dense:
    """Transformers' own attention, of float64."""

    def __init__(self, folder: Path, full_layers: Sequence[int]) -> None:
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self._model: Any = load_plain(folder, torch.float64, **options)
        self._full_layers = full_layers

    @torch.inference_mode()
    def __call__(self, ids: Ids, hidden: Sequence[Positions] = (), end: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        """For the tokens from `end` on, which do not see earlier hidden positions: logits [R, V], and weights [H, R, T]
        by layer for layers that see all keys."""
        mask = torch.ones(1, len(ids), dtype=torch.long)
        for low, high in hidden:
            mask[:, low:high] = 0
        before = self._model(torch.tensor([ids[:end]]), use_cache=True).past_key_values if end else None
        positions = torch.arange(end, len(ids))[None]
        found = self._model(
            torch.tensor([ids[end:]]),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=before,
            output_attentions=True,
        )
        return found.logits[0], {layer: found.attentions[layer][0] for layer in self._full_layers}


def expected(weights: dict[int, Tensor], rows: Sequence[int], starts: Sequence[int], end: int, spans: Spans) -> Shares:
    """The expected mean attribution of rows, float64, by weights [H, R, T] of layers, for a context with segments at
    `starts` and its end at `end`.
    """
    edges = [p for a, b in zip(starts, [*starts[1:], end], strict=True) for p in range(a, b, spans.size)]
    edges += [end, spans.prompt_end]
    lead = spans.num_lead
    edges = [max(edge, lead) for edge in edges]
    accumulator, codes = [], []
    for layer, weights_HRT in weights.items():
        if spans.layers and layer not in spans.layers:
            continue
        mean_HT = weights_HRT[:, list(rows)].mean(dim=1).double()
        parts = [mean_HT[:, a:b].sum(dim=1) for a, b in zip(edges, [*edges[1:], None], strict=True)]
        accumulator.append(torch.stack([*parts, 1 - mean_HT.sum(dim=1), mean_HT[:, :lead].sum(dim=1)], dim=1))
        codes += [layer * 65536 + head for head in range(len(mean_HT))]
    sums_HN = torch.cat(accumulator)
    largest, heads = sums_HN[:, :-NUM_OTHER_SHARES].max(dim=0)
    return Shares(sums_HN.mean(dim=0), largest, torch.tensor(codes)[heads])
