"""Estimates the GPU memory that a rank leaves free for its steps, in addition to weights, keys and values.

Torch allocates this memory while a step runs, and keeps it. The estimate is an upper bound, derived from the shapes of
the model and its largest steps: an overestimate wastes memory, but an underestimate makes steps fail.
"""

from dataclasses import astuple, dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from longleaf.config import EngineConfig
from longleaf.formatting import human_bytes
from longleaf.runs import ceil_div
from longleaf.sampling import MAX_BIASES
from workers.kv_cache.quantized import QuantizedPool
from workers.model.model import LayerSpec, Model
from workers.model.sharded_layers import ShardedLinear
from workers.sampling.device_sampler import MAX_LOGITS

MAX_GATHERED = 1 << 16
"""Maximum total of tokens whose keys are gathered from all ranks. They are held twice: 65,536 tokens with 8 key heads
of 128 in bfloat16 take 256 MiB. Above the limit, queries are gathered instead. An automatic choice never needs more
memory than the gathered queries and their partials.
"""
MAX_ROWS = 256
"""Rows of the largest bucket. With more rows, the computation takes longer than the launches."""
WIDE_TENSORS = 6
"""Number of tensors with the width of the widest layer that exist at once in a block of the model. For a gated layer:
its input, two products, the activation of one of them, their product, and the residual.
"""
PARTIALS = 4
"""Number of copies of a chunk's partials: computed, packed, received, and folded."""
CHOOSING = 8 * 8
"""Bytes per processed logit: float64 copies of the logit, sorted, with indices, and working memory of the sort."""
HISTORY, BIAS = 5, 16
"""Bytes per token of the vocabulary (HISTORY) and per bias (BIAS), for a sequence with penalties or biases."""
GRAPH = 8 << 20
"""Upper bound of the bytes of a CUDA graph without its working memory: some kilobytes per launch.
"""
GRAPHS_PER_SIZE = 8
"""Number of graphs per size: two to read keys, five to sample tokens, and one to broadcast them."""
KERNELS = 1 << 29
"""Bytes for tiles of kernels, parts of long reads, compiled code, and workspaces of matrix products."""
COMMUNICATOR = 1 << 30
PEER = 384 << 20
"""Bytes that NCCL takes for a group of ranks (COMMUNICATOR), and for each other rank of the machine once an all-to-all
has connected it (PEER): 32 channels of 12 MiB, as reported for eight H100 (github.com/NVIDIA/nccl/issues/1685).
"""
FRAGMENTS = 1 / 32
"""Share of a GPU that is lost to fragmentation between tensors of different sizes."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that a rank's steps need."""

    chunk: int
    """Activations of the model for the rows of a step, including its logits."""
    sampling: int
    """Temporary memory of sampling, and the histories for penalties."""
    partials: int
    """Queries and partials of all ranks' rows, or the keys that are gathered instead."""
    kernels: int
    graphs: int
    """Memory held by captured steps; see `room_for_graphs`."""
    drafts: int
    """Memory to roll back refused drafts; see `workers.step.draft_rollback`."""
    exchange: int
    """Memory of NCCL."""
    fragments: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        names = ("chunks", "sampling", "partials", "kernels", "graphs", "drafts", "NCCL", "fragments")
        return ", ".join(f"{human_bytes(size)} for {name}" for name, size in zip(names, astuple(self), strict=True))


def workspace(
    model: Model, config: EngineConfig, num_ranks_here: int, total_bytes: int, *, uses_nccl: bool = True
) -> Workspace:
    """The memory that the steps of a rank need on a GPU of `total_bytes`, in addition to weights, keys and values.
    Without NCCL, exchanges are copied through the host.
    """
    text = model.module.config.get_text_config()
    longest = ceil_div(ceil_div(config.chunk_size, config.world_size), config.block_size) * config.block_size
    num_rows = max(min(longest, config.chunk_size), config.max_rows)
    num_logits = config.max_rows * text.vocab_size
    return Workspace(
        chunk=_in_model(model, num_rows)
        + _in_mixers(model, num_rows * config.world_size)
        + _in_shares(model, config, num_rows, num_logits)
        + num_logits * torch.float32.itemsize,
        sampling=_sampling(config, text.vocab_size),
        partials=max(_partials(spec, model, config, num_rows) for spec in set(model.layers.values())),
        kernels=KERNELS,
        graphs=room_for_graphs(model, config) if config.cuda_graphs == "auto" else 0,
        drafts=_drafts(model, config),
        exchange=_exchange(config.world_size, num_ranks_here) if uses_nccl else 0,
        fragments=int(total_bytes * FRAGMENTS),
    )


def room_for_graphs(model: Model, config: EngineConfig) -> int:
    """Bytes of captured decode steps: those of the graphs, and the working memory of the largest step, because graphs
    do not share memory with eager steps.
    """
    sizes = bucket_sizes(config.max_rows)
    num_rows, vocabulary_size = sizes[-1], model.module.config.get_text_config().vocab_size
    partials = max(_partials(spec, model, config, num_rows) for spec in set(model.layers.values()))
    choosing = max(vocabulary_size, min(MAX_LOGITS, num_rows * vocabulary_size)) * CHOOSING
    return _in_model(model, num_rows) + partials + choosing + GRAPH * GRAPHS_PER_SIZE * len(sizes)


def _in_model(model: Model, num_rows: int) -> int:
    """Bytes of the activations of a model's block for `num_rows` rows."""
    copies = num_copies(model.module.config.get_text_config())
    return num_rows * copies * WIDE_TENSORS * widest(model) * model.dtype.itemsize


def _in_mixers(model: Model, num_rows: int) -> int:
    """Further bytes with recurrent states: every rank computes the rows of all ranks, in float32, and copies the states
    of the sequences of a step.
    """
    if model.mixers is None:
        return 0
    return num_rows * WIDE_TENSORS * widest(model) * torch.float32.itemsize + 2 * model.bytes_per_state


def _in_shares(model: Model, config: EngineConfig, num_rows: int, num_logits: int) -> int:
    """Further bytes with sharded weights: layers compute the rows of all ranks, and exchange their outputs."""
    if not config.has_shares:
        return 0
    return _in_model(model, num_rows * config.world_size) + 2 * num_logits * model.dtype.itemsize


def num_copies(text: PreTrainedConfig) -> int:
    """The number of copies of a row in the widest tensors: one for each expert that it is routed to."""
    counts = [getattr(text, name, None) for name in ("num_experts_per_tok", "moe_topk", "top_k_experts")]
    return max([1, *(int(number) for number in counts if number)])


def widest(model: Model) -> int:
    """Number of elements per row of the widest tensor between the layers of a model, except ids and logits."""
    parts = [part for part in model.decoder.modules() if not isinstance(part, nn.Embedding)]
    shapes = [parameter.shape for part in parts for parameter in part.parameters(recurse=False)]
    widths = [part.out_features for part in parts if isinstance(part, ShardedLinear)]
    return max([*widths, *(max(shape[-2:]) for shape in shapes if len(shape) > 1)])


def _partials(spec: LayerSpec, model: Model, config: EngineConfig, num_rows: int) -> int:
    size, wide = model.dtype.itemsize, torch.float32.itemsize
    per_head = spec.head_dim * (size + wide) + PARTIALS * (spec.value_dim + 1) * wide
    queries = num_rows * config.world_size * spec.num_heads * per_head
    is_gathering = config.prefill == "keys" and config.world_size > 1
    return max(queries, 2 * MAX_GATHERED * spec.num_stored * size if is_gathering else 0)


def _sampling(config: EngineConfig, vocabulary_size: int) -> int:
    num_together = max(vocabulary_size, min(MAX_LOGITS, config.max_rows * vocabulary_size))
    return num_together * CHOOSING + (config.max_sequences + 1) * (vocabulary_size * HISTORY + MAX_BIASES * BIAS)


def _drafts(model: Model, config: EngineConfig) -> int:
    """For 8-bit keys: the saved block of each sequence with drafts, and the keys and values that the rows of a step
    store. A sequence with drafts has at least two rows.
    """
    if config.kv_dtype != "int8" or not config.max_draft_tokens:
        return 0
    num_rows = max(config.max_rows, bucket_sizes(config.max_rows)[-1])
    stored = num_rows * sum(spec.num_stored for spec in model.layers.values()) * model.dtype.itemsize
    num_drafting = min(config.max_sequences, config.max_rows // 2)
    return num_drafting * QuantizedPool.bytes_per_block(model.layers, config.block_size) + stored


def _exchange(world_size: int, num_ranks_here: int) -> int:
    """Bytes of NCCL. All ranks form a group. With several machines, the ranks of each machine and the ranks with the
    same local number form further groups.
    """
    if world_size == 1:
        return 0
    num_groups = 1 if num_ranks_here == world_size else 3
    return num_groups * COMMUNICATOR + (num_ranks_here - 1) * PEER


def bucket_sizes(max_rows: int) -> list[int]:
    """The numbers of rows to which decode steps of a GPU are padded: powers of two, up to the first one that holds
    `max_rows` rows.
    """
    num_rows = min(MAX_ROWS, max_rows)
    return [1 << i for i in range((num_rows - 1).bit_length() + 1)]
