"""The GPU memory that a rank reserves for its steps, by settings of the model and of the cluster."""

from dataclasses import replace

import pytest

from longleaf import resources
from longleaf.config import EngineConfig
from longleaf.formatting import human_bytes
from workers.compat_check import kv_bytes_beside
from workers.kv_cache import pools
from workers.kv_cache import workspace_estimate as workspaces
from workers.kv_cache.pools import CONTEXT, default_kv_bytes, kv_bytes_within
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.workspace_estimate import COMMUNICATOR, KERNELS, PEER, num_copies, widest, workspace
from workers.model.meta_model import outline
from zoo.checkpoints import make_checkpoint

GIB = 1 << 30
TOTAL = 64 * GIB


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Models of hidden size 64 and 4 heads of 16, whose widest layer has 192 columns, over 512 ids; in bfloat16."""
    models = {}

    def get(family="llama"):
        if family not in models:
            folder = make_checkpoint(tmp_path_factory.mktemp(family), family, num_layers=2)
            models[family] = outline(str(folder), "bfloat16").model
        return models[family]

    return get


def needed(model, num_ranks_here=1, **settings):
    usual = {
        "world_size": num_ranks_here,
        "block_size": 128,
        "chunk_size": 4096,
        "max_sequences": 8,
        "max_draft_tokens": 0,
    }
    config = EngineConfig(model="", **(usual | settings))
    return workspace(model, config, num_ranks_here, TOTAL)


def test_steps_with_drafts_have_more_rows_than_sequences(model_of):
    without, drafting, many = (
        needed(model_of(), **settings) for settings in ({}, {"max_draft_tokens": 7}, {"max_sequences": 16})
    )
    assert drafting.chunk == many.chunk > without.chunk
    assert drafting.graphs == many.graphs > without.graphs


def test_sharded_layers_compute_the_rows_of_all_ranks(model_of):
    """The model without weights, as in `models check`, needs the same room."""
    whole, sharded = (needed(model_of(), 4, weights=weights) for weights in ("whole", "sharded"))
    num_rows, num_logits = 1024, 8 * 512
    assert sharded.chunk - whole.chunk == 4 * num_rows * workspaces.WIDE_TENSORS * 192 * 2 + 2 * num_logits * 2


def test_single_rank(model_of):
    found = needed(model_of())
    assert found.chunk == 4096 * workspaces.WIDE_TENSORS * 192 * 2 + 8 * 512 * 4
    assert found.sampling == 8 * 512 * 64 + 9 * (512 * 5 + 1024 * 16)
    assert found.partials == 4096 * 4 * (16 * (2 + 4) + workspaces.PARTIALS * 17 * 4)
    assert (found.kernels, found.exchange, found.fragments) == (KERNELS, 0, 2 * GIB)
    assert found.total == found.chunk + found.sampling + found.partials + KERNELS + found.graphs + 2 * GIB


def test_captured_steps_retain_the_memory_of_the_largest(model_of):
    """For 8 sequences there are graphs for 1, 2, 4 and 8 rows."""
    in_model, choosing = 8 * workspaces.WIDE_TENSORS * 192 * 2, 8 * 512 * 64
    partials = 8 * 4 * (16 * (2 + 4) + workspaces.PARTIALS * 17 * 4)
    wanted = in_model + partials + choosing + 4 * workspaces.GRAPHS_PER_SIZE * workspaces.GRAPH
    assert needed(model_of()).graphs == wanted
    assert needed(model_of(), cuda_graphs="off").graphs == 0


@pytest.mark.parametrize(("num_sequences", "num_drafting", "num_rows"), [(8, 8, 16), (2, 2, 16), (40, 20, 64)])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_rejected_drafts_need_saved_blocks_with_8_bit_keys(model_of, num_sequences, num_drafting, num_rows, graphs):
    """This holds with and without captured steps. Sequences with drafts have at least 2 rows, steps at least 16."""
    settings = {"max_sequences": num_sequences, "max_draft_tokens": 7, "cuda_graphs": graphs}
    block = QuantizedPool.bytes_per_block(model_of().layers, 128)
    stored = num_rows * 2 * (2 * 2 * 16) * 2
    assert needed(model_of(), **settings, kv_dtype="int8").drafts == num_drafting * block + stored
    assert needed(model_of(), **settings).drafts == 0
    assert needed(model_of(), **(settings | {"max_draft_tokens": 0}), kv_dtype="int8").drafts == 0


def test_pieces_of_a_chunk_are_whole_blocks_and_all_rows_have_partials(model_of):
    one, three = needed(model_of()), needed(model_of(), 3)
    num_logits = 8 * 512 * 4
    assert (three.chunk - num_logits) * 4096 == (one.chunk - num_logits) * 11 * 128
    assert three.partials * 4096 == one.partials * 3 * 11 * 128


def test_logits_of_many_rows_are_computed_in_parts(model_of, monkeypatch):
    monkeypatch.setattr(workspaces, "MAX_LOGITS", 3 * 512)
    few, many = (needed(model_of(), max_sequences=count).sampling for count in (4, 8))
    assert many - few == 4 * (512 * 5 + 1024 * 16)


def test_rows_of_many_sequences_count_as_a_chunk(model_of):
    assert needed(model_of(), chunk_size=16, max_sequences=300).partials == needed(model_of(), chunk_size=300).partials


def test_row_is_copied_for_each_of_its_experts(model_of):
    mixtral = model_of("mixtral")
    assert num_copies(mixtral.module.config) == 2
    assert widest(mixtral) == 2 * 192  # gate and up projections in one


def test_learned_positions_and_ids_are_not_widths(model_of):
    """GPT-2 has 8192 positions and 512 ids."""
    assert widest(model_of("gpt2")) < 512


def test_latents_count_with_their_width(model_of):
    found = needed(model_of("deepseek_v3"))
    assert found.partials == 4096 * 4 * ((40 + 16) * 6 + workspaces.PARTIALS * 41 * 4)


def test_gathered_keys_need_memory_if_requested(model_of):
    gathered = 2 * workspaces.MAX_GATHERED * (2 * 2 * 16) * 2
    assert needed(model_of(), 2, chunk_size=128, prefill="keys").partials == gathered
    assert needed(model_of(), 2, chunk_size=128, prefill="auto").partials < gathered
    assert needed(model_of(), 1, chunk_size=128, prefill="keys").partials < gathered


@pytest.mark.parametrize(
    ("world_size", "num_ranks_here", "expected"),
    [(1, 1, 0), (2, 2, COMMUNICATOR + PEER), (8, 8, COMMUNICATOR + 7 * PEER), (8, 4, 3 * COMMUNICATOR + 3 * PEER)],
)
def test_process_groups_need_memory(model_of, world_size, num_ranks_here, expected):
    assert needed(model_of(), num_ranks_here, world_size=world_size).exchange == expected


def test_gpu_pool_gets_the_memory_that_steps_leave(model_of, caplog):
    config = EngineConfig(model="")
    found, memory = workspace(model_of(), config, 1, TOTAL), resources.Memory(TOTAL, 40 * GIB)
    with caplog.at_level("INFO", logger="longleaf"):
        assert kv_bytes_within(memory, "cuda:1", model_of(), config, 1) == 40 * GIB - found.total
    left = human_bytes(40 * GIB - found.total)
    begin = f"kv_bytes: {left} of 40.0 GiB free on cuda:1 after loading the weights; the others are "
    parts = (found.chunk, found.sampling, found.partials, KERNELS, found.graphs, 0, 0, 2 * GIB)
    names = ("chunks", "sampling", "partials", "kernels", "graphs", "drafts", "NCCL", "fragments")
    message = ", ".join(f"{human_bytes(size)} for {name}" for size, name in zip(parts, names, strict=True))
    assert caplog.messages == [begin + message]
    assert kv_bytes_within(resources.Memory(TOTAL, GIB), "cuda:1", model_of(), config, 1) == 0


def test_ranks_that_share_a_gpu_are_limited_to_their_share(model_of, monkeypatch):
    """The current use by the other ranks does not matter. Ranks on one GPU do not use NCCL."""
    model, config = replace(model_of(), device="cuda:0"), EngineConfig(model="", world_size=2)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 3 * GIB)
    found = []
    for free in (60 * GIB, 20 * GIB):
        monkeypatch.setattr(pools, "memory_of", lambda device, free=free: resources.Memory(TOTAL, free))
        found.append(default_kv_bytes(model, config, 2, 2))
    needed = workspace(model, config, 2, TOTAL // 2, uses_nccl=False)
    assert needed.exchange == 0
    assert found == [TOTAL // 2 - 3 * GIB - CONTEXT - needed.total, 20 * GIB - needed.total]


def test_check_uses_the_gpu_of_each_rank(model_of, monkeypatch):
    """Ranks beyond the local GPUs are assumed to be on equal machines."""
    free = {"cuda:0": 20 * GIB, "cuda:1": 30 * GIB, "cuda:2": 40 * GIB}
    requested = []

    def memory_of(device):
        requested.append(device)
        return resources.Memory(TOTAL, free[device])

    monkeypatch.setattr("workers.compat_check.count_gpus", lambda: 3)
    monkeypatch.setattr("workers.compat_check.memory_of", memory_of)
    config = EngineConfig(model="", world_size=5)
    left = workspace(model_of(), config, 3, TOTAL).total + 5 * GIB
    sizes = [size * GIB - left for size in (20, 30, 40, 20, 30)]
    assert kv_bytes_beside(5 * GIB, model_of(), config) == sizes
    assert sorted(requested) == ["cuda:0", "cuda:1", "cuda:2"]
