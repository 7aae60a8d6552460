"""Exchanges of models whose weights are divided over ranks, from the sizes in their configs.

Sources: docs/adr/0029-weights-by-shares.md. Linear layers gather outputs. MLPs, experts and the embedding gather
addends, which each rank sums in the same order: with N ranks a rank sends N - 1 times its part.

Only families of these kinds of layers are known: separate or fused projections of queries, keys and values, and latent
attention; gated MLPs, fused ones, and experts with or without shared ones.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from bench.predict.formulas import Cluster, Operation, Shape, merge_operations

INT64 = 8


@dataclass(frozen=True, slots=True)
class Gather:
    """Linear layers with the same input, divided by outputs."""

    num_in: int
    outputs: tuple[int, ...]
    """The number of outputs of each layer."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Layers whose outputs are sums over ranks."""

    num_in: int
    num_out: int
    num_experts: int = 0
    """The number of experts that a row is routed to; 0: none."""


Exchange = Gather | Sum


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The divided parts of a layer of the model."""

    before: tuple[Exchange, ...]
    """Before attention: the queries, keys and values."""
    after: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class ShardedExchanges:
    """The exchanges of a model in a forward pass."""

    layers: tuple[LayerParts, ...]
    attention: Shape
    """The attention of a layer, for one row."""
    hidden: int
    vocabulary: int
    itemsize: int
    """Bytes of an activation."""

    def decode(self, num_rows: int, cluster: Cluster, merge: str = "gather") -> list[Operation]:
        """The operations of a decode step, the embedding, the head and the sampled tokens included."""
        ends = Sum(self.hidden, self.hidden), Gather(self.hidden, (self.vocabulary,))
        embedding, head = (self._in_decode(end, num_rows, cluster) for end in ends)
        found = [embedding]
        for layer in self.layers:
            found += self.decode_layer(layer, num_rows, cluster, merge)
        return [*found, head, Operation("broadcast", "world", INT64 * num_rows)]

    def decode_layer(
        self, layer: LayerParts, num_rows: int, cluster: Cluster, merge: str = "gather"
    ) -> list[Operation]:
        """The operations of one layer in a decode step."""
        before, after = (
            [self._in_decode(exchange, num_rows, cluster) for exchange in part] for part in (layer.before, layer.after)
        )
        return [*before, *merge_operations(merge, cluster, replace(self.attention, rows=num_rows)), *after]

    def prefill(self, num_rows: int, cluster: Cluster) -> list[Operation]:
        """The operations of a chunk with so many rows on each rank, except those of attention. The last layer ends with
        its keys and values.
        """
        found = [Operation("all_gather", "world", INT64 * num_rows), self._returned(self.hidden, num_rows, cluster)]
        *layers, last = self.layers
        exchanges = [*(one for layer in layers for one in (*layer.before, *layer.after)), *last.before]
        for exchange in exchanges:
            sizes = [self.itemsize * exchange.num_in]
            if isinstance(exchange, Sum) and exchange.num_experts:
                sizes += [size * exchange.num_experts for size in (INT64, self.itemsize)]
            found += [Operation("all_gather", "world", size * num_rows) for size in sizes]
            found.append(self._returned(width_of(exchange, cluster), num_rows, cluster))
        return found

    def _in_decode(self, exchange: Exchange, num_rows: int, cluster: Cluster) -> Operation:
        return Operation("all_gather", "world", self.itemsize * num_rows * width_of(exchange, cluster))

    def _returned(self, width: int, num_rows: int, cluster: Cluster) -> Operation:
        """Each rank computes results of this width for the rows of all ranks, and returns them."""
        return Operation("all_to_all", "world", self.itemsize * num_rows * width * cluster.world_size)


def exchanges_of(config: Any, itemsize: int) -> ShardedExchanges:
    """The exchanges of a model with this config of transformers. `itemsize`: bytes of an activation."""
    text = config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    kv_heads = 1 if latent else text.num_key_value_heads
    dim = latent or getattr(text, "head_dim", None) or hidden // heads
    return ShardedExchanges(
        layers=tuple(_layer(text, i, dim) for i in range(text.num_hidden_layers)),
        attention=Shape(heads=heads, kv_heads=kv_heads, dim=dim, key_width=itemsize),
        hidden=hidden,
        vocabulary=text.vocab_size,
        itemsize=itemsize,
    )


def _layer(text: Any, number: int, dim: int) -> LayerParts:
    *before, output = _attention(text, dim)
    return LayerParts(tuple(before), (output, *_mlp(text, number)))


def _attention(text: Any, dim: int) -> tuple[Exchange, ...]:
    """Linear layers of attention, the last one after it. The layer that expands latents is on every rank."""
    hidden, heads = text.hidden_size, text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        query = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        compressed = text.kv_lora_rank + text.qk_rope_head_dim
        queries = text.q_lora_rank
        first = (Gather(hidden, (queries, compressed)), Gather(queries, (query,))) if queries else ()
        first = first or (Gather(hidden, (query, compressed)),)
        return *first, Gather(heads * text.v_head_dim, (hidden,))
    keys = text.num_key_value_heads * dim
    outputs = (heads * dim + 2 * keys,) if _is_fused(text) else (heads * dim, keys, keys)
    return Gather(hidden, outputs), Gather(heads * dim, (hidden,))


def _mlp(text: Any, layer: int) -> tuple[Exchange, ...]:
    hidden = text.hidden_size
    if _is_fused(text):
        width = text.intermediate_size
        return Gather(hidden, (2 * width,)), Gather(width, (hidden,))
    num_experts = getattr(text, "num_experts_per_tok", None) or 0
    if not num_experts or layer < getattr(text, "first_k_dense_replace", 0):
        return (Sum(hidden, hidden),)
    experts = Sum(hidden, hidden, num_experts)
    return (experts, Sum(hidden, hidden)) if getattr(text, "n_shared_experts", None) else (experts,)


def _is_fused(text: Any) -> bool:
    return text.model_type == "phi3"


def width_of(exchange: Exchange, cluster: Cluster) -> int:
    """Results per row of the rank that has the most. With aligned shares it has up to 2 % more outputs."""
    if isinstance(exchange, Sum):
        return exchange.num_out
    return sum(ceil(number / cluster.world_size) for number in exchange.outputs)
