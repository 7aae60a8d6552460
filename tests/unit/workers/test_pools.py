"""The bytes of a rank's KV cache that are assigned to replicated windowed layers."""

from types import SimpleNamespace

import msgspec
import pytest

from longleaf import resources
from longleaf.config import EngineConfig
from longleaf.errors import ModelRefused, StartError
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.shares import even_share
from tests.support.scheduling import Asker
from tests.support.threads import make_spec
from workers.compat_check import check, kv_bytes_beside
from workers.kv_cache.pools import FREE_MEMORY_SHARE, make_pool
from workers.model.meta_model import outline
from workers.rank import Rank
from zoo.checkpoints import make_checkpoint
from zoo.families import SECTION, WINDOW

BLOCK = 64
LAYER = 2 * (2 * 16) * 4
"""Bytes of a token in a layer: keys and values of 2 heads of 16, float32."""


@pytest.fixture(scope="module")
def pool_of(tmp_path_factory):
    """The pool size of a family, and its number of window blocks."""
    models = {}

    def get(family, num_ranks_here=1, **settings):
        if family not in models:
            models[family] = outline(str(make_checkpoint(tmp_path_factory.mktemp(family), family)), "float32").model
        config = EngineConfig(model="", **{"block_size": BLOCK, "window_keys": "replicated", **settings})
        return make_pool(models[family], config, num_ranks_here)

    return get


def test_sharded_windows_have_no_separate_pool(pool_of):
    pool, windows = pool_of("gemma3", kv_bytes=1 << 20, window_keys="sharded")
    assert windows is None
    assert pool.num_blocks == (1 << 20) // (4 * LAYER * BLOCK)


def test_models_without_windows_have_one_pool(pool_of):
    pool, windows = pool_of("llama", kv_bytes=1 << 20)
    assert windows is None
    assert pool.num_blocks == (1 << 20) // (4 * LAYER * BLOCK)


def test_window_pool_fits_generations_and_contexts(pool_of):
    """Layers 0 and 2 of 4 have windows; a path may need two of them, which begin within blocks."""
    pool, windows = pool_of("gemma3", kv_bytes=64 << 20, max_sequences=8)
    num_blocks = 2 * 8 * (2 * WINDOW // BLOCK + 2)
    assert windows == WindowSpec(reaches=(AttentionSpan(WINDOW),), num_blocks=num_blocks, bytes_per_token=2 * LAYER)
    assert pool.num_blocks == ((64 << 20) - num_blocks * 2 * LAYER * BLOCK) // (2 * LAYER * BLOCK)
    assert [pool.keys[layer].shape[1] for layer in range(4)] == [
        num_blocks * BLOCK + 1,
        pool.num_blocks * BLOCK + 1,
    ] * 2


def test_windows_take_at_most_half(pool_of):
    pool, windows = pool_of("llama4", kv_bytes=4 << 20, max_sequences=64)
    assert windows.reaches == (AttentionSpan(section=SECTION),)
    assert windows.num_blocks == (2 << 20) // (3 * LAYER * BLOCK)
    assert pool.num_blocks == ((4 << 20) - windows.num_blocks * 3 * LAYER * BLOCK) // (LAYER * BLOCK)


def test_explicit_window_size_is_used(pool_of):
    pool, windows = pool_of("gemma3", kv_bytes=4 << 20, window_bytes=3 << 20)
    assert windows.num_blocks == 3 * pool.num_blocks == (3 << 20) // (2 * LAYER * BLOCK)


def test_8_bit_window_blocks_have_scales(pool_of):
    _, windows = pool_of("gemma3", kv_bytes=4 << 20, window_bytes=1 << 20, kv_dtype="int8")
    per_block = 2 * 2 * (BLOCK * (2 * 16 + 4) + 16)
    assert windows.num_blocks == (1 << 20) // per_block
    assert windows.bytes_per_token == -(-per_block // BLOCK)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("block_size", "replicate_below"),
    [
        (64, 0),
        (512, 200),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16, 0), (16, 200), (64, 200), (512, 0))),
    ],
)
def test_smallest_window_pool_holds_a_context_and_a_generation(pool_of, block_size, replicate_below):
    """This holds for all lengths, and for --max-sequences 1 without an explicit setting."""
    settings = {"block_size": block_size, "replicate_below": replicate_below, "max_sequences": 1}
    with pytest.raises(StartError) as refused:
        pool_of("gemma3", kv_bytes=8 << 20, window_bytes=1, **settings)
    least = int(str(refused.value).split(" need ")[1].split()[0].replace(",", ""))
    _, windows = pool_of("gemma3", kv_bytes=8 << 20, window_bytes=least, **settings)
    bench = Asker(windows=windows, blocks=(5000 // block_size,) * 2, chunk_size=512, max_positions=8000, **settings)
    bench.ingest("book", 1001)
    bench.run()
    requested = [bench.ask(count, 300, context) for context in (None, "book") for count in (1, 150, 700)]
    bench.run()
    assert [len(bench.tokens(job)) for job in requested] == [300] * 6
    assert pool_of("gemma3", kv_bytes=8 << 20, **settings)[1].num_blocks >= windows.num_blocks


def test_models_without_windows_log_a_notice(pool_of, caplog):
    with caplog.at_level("INFO", logger="longleaf"):
        pool_of("llama", kv_bytes=1 << 20, window_keys="sharded")
        assert caplog.messages == []
        pool_of("llama", kv_bytes=1 << 20)
    assert caplog.messages == ["window_keys: this model has no windowed layers, so all keys are sharded"]


def test_window_only_model_uses_all_bytes_for_windows(pool_of):
    pool, windows = pool_of("mistral", kv_bytes=2 << 20, max_sequences=64)
    assert windows.num_blocks == (2 << 20) // (4 * LAYER * BLOCK)
    assert pool.num_blocks * BLOCK == 1 << 31


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_bytes": 1 << 20, "window_bytes": 1 << 21}, "window_bytes: 2,097,152 bytes exceed the 1,048,576"),
        ({"kv_bytes": 1 << 20, "window_bytes": 1000}, "window_bytes: .* need 655,360 bytes .* 1,000 are available"),
        ({"kv_bytes": 1 << 18}, "kv_bytes: .* need 655,360 bytes .* 131,072 are available"),
        (
            {"kv_bytes": 1 << 20, "window_bytes": 1 << 20},
            "kv_bytes: 1,048,576 bytes are too few for one block of 32,768 bytes beside 1,048,576 for windows",
        ),
    ],
)
def test_too_few_bytes_are_reported(pool_of, settings, reason):
    with pytest.raises(StartError, match=reason):
        pool_of("gemma3", **settings)


def test_ranks_of_a_machine_share_its_free_memory(pool_of, monkeypatch):
    """Ranks of other machines do not count."""
    monkeypatch.setattr(resources, "memory", lambda: resources.Memory(1 << 40, 50 << 20))
    pool, _ = pool_of("llama", num_ranks_here=2, world_size=8)
    assert pool.num_blocks == (20 << 20) // 2 // (4 * LAYER * BLOCK)


def test_pool_larger_than_memory_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(resources, "memory", lambda: resources.Memory(1000, 500))
    config = EngineConfig(model="/no/such/folder", kv_bytes=251, world_size=4, device="cpu")
    reason = "^kv_bytes: 251 for each of 4 ranks here exceeds the 1,000 bytes of memory of this machine$"
    with pytest.raises(StartError, match=reason):
        Rank(make_spec(0, config)).load()
    with pytest.raises(ModelRefused):
        Rank(make_spec(0, msgspec.structs.replace(config, kv_bytes=250))).load()
    with pytest.raises(StartError, match="^kv_bytes: 1,001 for each of 1 rank here exceeds the 1,000 bytes"):
        Rank(make_spec(0, msgspec.structs.replace(config, kv_bytes=1001, world_size=1))).load()


def test_check_and_ranks_set_aside_the_same_room_for_lost_ranks(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "llama", num_layers=2)
    config = EngineConfig(
        model=str(folder), world_size=3, weights="sharded", spare_ranks=1, device="cpu", block_size=BLOCK
    )
    free = 50 << 20
    monkeypatch.setattr(resources, "memory", lambda: resources.Memory(1 << 40, free))
    ranks = [Rank(make_spec(number, config)) for number in range(3)]
    for number, rank in enumerate(ranks):
        rank.load(even_share(number, 3))
    spare = max(rank.model.spare_bytes for rank in ranks)
    shares = check(config, has_weights=False).share_bytes
    free += 3 * max(shares)  # ranks see the memory that is left beside their weights
    found = check(config, has_weights=False)
    assert found.spare_bytes == spare > 40 / 80 * 0.9 * min(shares)
    assert found.plans[0].rooms[0].kv_bytes == int(((50 << 20) - 3 * spare) * FREE_MEMORY_SHARE / 3)
    assert found.plans[0].rooms[0].tokens == BLOCK * min(rank.pool.num_blocks for rank in ranks)
    without = check(msgspec.structs.replace(config, spare_ranks=0), has_weights=False)
    assert (without.spare_bytes, without.plans[0].tokens > found.plans[0].tokens) == (0, True)
    for rank in ranks:
        rank.close()


def test_check_uses_the_memory_limit_of_a_container(monkeypatch):
    monkeypatch.setattr(resources, "memory", lambda: resources.Memory(1 << 40, 500))
    config = EngineConfig(model="", world_size=4, device="cpu")
    model = SimpleNamespace(spare_bytes=0)
    assert kv_bytes_beside(25, model, config) == [(500 - 4 * 25) * 0.4 / 4] * 4
    assert kv_bytes_beside(150, model, config) == [0] * 4
