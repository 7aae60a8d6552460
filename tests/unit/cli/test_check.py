"""`longleaf models check`: the findings of the two roles for a checkpoint, and the output."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from coordinator.text.compat_check import check as check_text
from longleaf import weights_choice
from longleaf.cli.models import (
    describe_exchanges,
    describe_gpus,
    describe_spare,
    exactness_of,
    kinds_table,
    show,
    spans,
)
from longleaf.config import EngineConfig
from longleaf.fingerprint import read_fingerprint
from longleaf.formatting import human_bytes
from longleaf.model_report import (
    AttentionKind,
    ExchangeReport,
    ModelReport,
    ReplicatedReport,
    StateReport,
    TextReport,
)
from longleaf.resources import Memory
from tests.support.terminal import Terminal
from workers import compat_check
from workers.compat_check import check
from workers.model import mixers
from workers.model import model as models
from workers.model.mixers import describe_layers
from zoo.checkpoints import PAD_IDS, make_checkpoint

FAMILIES = ("llama", "qwen3", "mistral", "smollm3", "gemma2", "gpt_oss", "mistral3", "glm4_moe_lite")


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **settings)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_check_on_the_meta_device_matches_the_check_with_weights(tmp_path: Path, family: Any) -> None:
    folder = make_checkpoint(tmp_path, family)
    for dtype in ("auto", "bfloat16"):
        wanted = config(folder, kv_bytes=1 << 20, dtype=dtype)
        outlined = check(wanted, has_weights=False)
        assert outlined.reason == ""
        loaded = check(wanted, has_weights=True)
        assert replace(outlined, has_weights=True, is_exact=True, exactness_note="") == loaded
    loaded = models.load(str(folder), "float32", "cpu")
    assert sum(len(kind.layers) for kind in outlined.kinds) == len(loaded.layers)
    assert 2 * outlined.bytes_per_token == loaded.bytes_per_token
    assert outlined.weight_bytes == sum(2 * p.numel() for p in loaded.module.parameters())


def test_tied_weights_count_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", num_layers=1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tied, loaded = (check(config(folder), has_weights=has_weights) for has_weights in (False, True))
    assert tied.weight_bytes == loaded.weight_bytes


def test_weights_of_each_rank_are_reported_if_there_are_several(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    one, three, sharded = (
        check(config(folder, kv_bytes=1 << 20, **settings), has_weights=False)
        for settings in ({}, {"world_size": 3}, {"world_size": 3, "weights": "sharded"})
    )
    assert (one.share_bytes, one.share_note) == ((), "")
    assert len(three.share_bytes) == 3
    assert sharded.share_bytes == three.share_bytes
    assert sharded.weight_bytes / 3 <= max(three.share_bytes) < 0.4 * three.weight_bytes


def test_room_for_lost_ranks_is_printed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    settings = {"world_size": 3, "spare_ranks": 1, "kv_bytes": 1 << 20}
    found = check(config(folder, weights="sharded", **settings), has_weights=False)
    room = human_bytes(found.spare_bytes)
    assert describe_spare(found) == f"{room} more for a lost rank, not used for keys and values"
    whole = check(config(folder, weights="whole", **settings), has_weights=False)
    assert describe_spare(whole) == f"{room} more for a lost rank, with --weights sharded"


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, "whole"),
        ({"world_size": 2}, "whole"),
        ({"world_size": 2, "weights": "sharded", "spare_ranks": 1}, "sharded"),
    ],
)
def test_a_plan_for_gpus_leaves_room_for_weights_and_workspace(tmp_path, settings, weights) -> None:
    found = check(config(make_checkpoint(tmp_path, "llama"), kv_bytes=1 << 20, **settings), has_weights=False)
    gpus = found.gpus
    assert gpus is not None
    count = settings.get("world_size", 1)
    assert (gpus.num_gpus, gpus.weights) == (count, weights)
    assert gpus.weight_bytes == (max(found.share_bytes) if weights == "sharded" else found.weight_bytes)
    spare = found.spare_bytes if weights == "sharded" else 0
    room = gpus.total_bytes - gpus.weight_bytes - gpus.workspace_bytes - spare
    assert gpus.tokens == room // found.bytes_per_token * count
    where = "a GPU of 80 GB" if count == 1 else "2 GPUs of 80 GB"
    assert f"about {gpus.tokens:,} tokens on {where}, beside " in describe_gpus(gpus)


def test_weights_larger_than_gpus_are_planned_in_shares(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compat_check, "workspace", lambda *_: SimpleNamespace(total=1000))
    folder = make_checkpoint(tmp_path, "llama")
    whole = check(config(folder, world_size=2), has_weights=False).weight_bytes
    for num_bytes, automatic in ((3 * whole // 4, "sharded"), (2 * whole, "whole")):
        monkeypatch.setattr(compat_check, "GPU_BYTES", num_bytes)
        plans = [
            check(config(folder, world_size=2, **settings), has_weights=False).gpus
            for settings in ({"weights": "whole"}, {})
        ]
        assert [plan and plan.weights for plan in plans] == ["whole", automatic]
        assert [bool(plan and plan.tokens) for plan in plans] == [automatic == "whole", True]


def test_as_many_spare_ranks_as_ranks_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    found = check(config(folder, world_size=2, spare_ranks=2, weights="sharded"), has_weights=False)
    assert found.reason == "spare_ranks: 2 is not below the 2 ranks"


@pytest.mark.parametrize(("free_of_weights", "weights"), [(2.0, "sharded"), (3.0, "whole")])
def test_the_plan_is_for_the_weights_that_serve_chooses(tmp_path, monkeypatch, free_of_weights, weights) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    weight_bytes = check(config(folder), has_weights=False).weight_bytes
    free = int(free_of_weights * weight_bytes)
    monkeypatch.setattr(weights_choice, "memory", lambda: Memory(1 << 40, free))
    assert check(config(folder, world_size=2, kv_bytes=1 << 12), has_weights=False).weights == weights
    assert check(config(folder, world_size=2, weights="whole"), has_weights=False).weights == "whole"


def test_exchanges_of_a_decode_step_are_printed(tmp_path: Path) -> None:
    """4 layers: a gather of queries, keys and values and one of outputs, a sum of the MLP, and a merge in each."""
    folder = make_checkpoint(tmp_path, "llama")
    assert check(config(folder), has_weights=False).exchanges is None
    found = check(config(folder, world_size=3), has_weights=False).exchanges
    assert found == ExchangeReport(merges=4, gathers=2 * 4 + 1, sums=4 + 1)
    expected = "5 per decode step; 19 with --weights sharded (9 gathers, 5 sums, 4 merges, 1 of tokens)"
    assert describe_exchanges(found) == expected


def test_sharded_weights_leave_more_room_for_keys(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    whole, sharded = (
        check(config(folder, world_size=2, weights=weights), has_weights=False).plans[0].rooms[0].kv_bytes
        for weights in ("whole", "sharded")
    )
    assert sharded > whole - (1 << 28)  # memory that other processes take meanwhile


def test_trained_length_is_that_of_the_scaled_rope(tmp_path: Path) -> None:
    """The config of a Ministral 3 reports only 4096 positions, of which 512 were stretched by 16."""
    folder = make_checkpoint(tmp_path, "ministral3", max_positions=4096)
    assert (check(config(folder), has_weights=False).trained, check_text(folder).max_positions) == (8192, 4096)


def test_layers_with_equal_attention_are_one_kind(tmp_path: Path) -> None:
    windowed, full = check(config(make_checkpoint(tmp_path, "gemma2")), has_weights=False).kinds
    assert windowed == AttentionKind(layers=(0, 2), num_heads=4, num_kv_heads=2, head_dim=16, window=256)
    assert full == AttentionKind(layers=(1, 3), num_heads=4, num_kv_heads=2, head_dim=16)


def test_memory_of_replicated_windows_is_reported_for_windowed_models(tmp_path: Path) -> None:
    """2 of 4 layers see 256 tokens; each has 2 key heads of 16 in float32."""
    per_layer = 2 * 2 * 16 * 4
    mixed = check(config(make_checkpoint(tmp_path / "a", "gemma2")), has_weights=False).replicated
    assert mixed == ReplicatedReport(bytes_per_token=2 * per_layer, bytes_per_window=256 * 2 * per_layer)
    windowed = check(config(make_checkpoint(tmp_path / "b", "mistral")), has_weights=False).replicated
    assert windowed == ReplicatedReport(bytes_per_token=0, bytes_per_window=256 * 4 * per_layer)
    assert check(config(make_checkpoint(tmp_path / "c", "llama")), has_weights=False).replicated is None


def test_8_bit_keys_include_their_scales(tmp_path: Path) -> None:
    """4 layers of 2 key heads of 16, with 4 bytes of scale per token and 16 exponents per block."""
    found = check(config(make_checkpoint(tmp_path, "llama"), kv_dtype="int8", block_size=60), has_weights=False)
    assert (found.reason, found.dtype, found.kv_dtype) == ("", "float32", "int8")
    assert found.bytes_per_token == math.ceil(4 * 2 * (2 * 16 + 4 + 16 / 60))
    assert found.dtypes == "float32, keys in int8"


@pytest.mark.extended
def test_latents_are_counted_without_weights(tmp_path: Path) -> None:
    """GLM-4.7-Flash: 47 layers of a latent of 512 and a rotary key of 64 in bfloat16. Its 20 heads of 256 would take
    962,560 bytes."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe_lite", "dtype": "bfloat16"}))
    found = check(config(tmp_path, kv_bytes=1 << 30), has_weights=False)
    assert (found.reason, found.bytes_per_token) == ("", 47 * (512 + 64) * 2)
    assert found.weight_bytes == 59_886_781_952


@pytest.mark.extended
def test_keys_and_values_of_different_dims_are_counted_separately(tmp_path: Path) -> None:
    """MiMo V2 Flash: 39 layers of 8 key heads and 9 of 4, of 192 dims and values of 128, in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mimo_v2_flash", "dtype": "bfloat16"}))
    found = check(config(tmp_path, kv_bytes=1 << 30), has_weights=False)
    assert (found.reason, found.bytes_per_token) == ("", (39 * 8 + 9 * 4) * (192 + 128) * 2)
    assert {(kind.head_dim, kind.value_dim) for kind in found.kinds} == {(192, 128)}
    assert list(kinds_table(found.kinds).columns[4].cells) == ["192, values 128"] * 2
    refused = check(config(tmp_path, kv_dtype="int8"), has_weights=False)
    assert "keys and values of equal dim; these have 192 and 128" in refused.reason


def test_8_bit_latents_are_refused(tmp_path: Path) -> None:
    found = check(config(make_checkpoint(tmp_path, "deepseek_v3"), kv_dtype="int8"), has_weights=False)
    assert found.reason.startswith("kv_dtype: int8 ")
    assert found.kinds == ()


def test_check_without_weights_needs_little_memory(tmp_path: Path) -> None:
    """The weights would take 8 TiB: nothing of that size may be allocated."""
    folder = make_checkpoint(tmp_path, "llama", num_layers=2)
    (folder / "model.safetensors").unlink()
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"vocab_size": 1 << 30, "hidden_size": 1 << 10, "head_dim": 64, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(settings))
    found = check(config(folder, kv_bytes=1), has_weights=False)
    assert (found.reason, found.bytes_per_token) == ("", 2 * 2 * 2 * 64 * 4)
    assert found.weight_bytes > 4 << 40
    assert "cannot be loaded" in check(config(folder), has_weights=True).reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_bidirectional_attention": True}, "not causal"),
        ({"use_bidirectional_attention": "all"}, "not causal"),
        ({"model_type": "bert"}, "not causal"),
        ({"model_type": "no-such-model"}, "cannot be loaded"),
        ({"model_type": "t5"}, "no causal language model of type t5"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "the quantization 'bitsandbytes' is not supported"),
        ({"hidden_size": "wide"}, "field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str"),
        (
            {"num_attention_heads": 5},
            "ValueError: The hidden size (64) is not a multiple of the number of attention heads",
        ),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "does not know rope_type: mrope"),
        ({"hidden_act": "squash"}, "does not know hidden_act: squash"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ": Missing required keys in `rope_parameters`"),
    ],
)
def test_refusal_gives_the_reason(tmp_path: Path, change: dict[str, object], words: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    found = check(config(folder), has_weights=False)
    assert words in found.reason
    assert found.kinds == ()
    if not {"model_type", "quantization_config"} & change.keys():  # the weights are those of Llama
        assert words in check(config(folder), has_weights=True).reason


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"metadata": {}}, "has no weight_map"),
        ({"metadata": {}, "weight_map": 3}, "has no weight_map"),
        (
            {"metadata": {}, "weight_map": {"model.norm.weight": 3}},
            "has no weight_map",
        ),
        ([], "has no weight_map"),
        ({"weight_map": {"model.norm.weight": "part.safetensors"}}, "has no metadata, which transformers requires"),
    ],
)
def test_missing_index_entry_is_named(tmp_path: Path, index: object, words: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"model.safetensors.index.json {words}" in check(config(folder), has_weights=True).reason


def test_weights_of_wrong_shape_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 600}))
    words = "lm_head.weight has shape [512, 64], but the config requires [600, 64]"
    assert words in check(config(folder), has_weights=True).reason


def test_attention_that_is_bidirectional_only_for_images_is_supported(tmp_path: Path) -> None:
    """The larger models of Gemma 4 have such attention."""
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"use_bidirectional_attention": "vision"}))
    assert check(config(folder), has_weights=False).reason == ""


def test_missing_weights_are_found_during_loading(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_layers=2)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3, "layer_types": None}))
    assert check(config(folder), has_weights=False).reason == ""
    assert "lacks weights" in check(config(folder), has_weights=True).reason


@pytest.mark.parametrize("pad_token_id", PAD_IDS)
def test_stateful_model_is_not_reported_exact_without_weights(
    tmp_path: Path, pad_token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1 is such a model if its mixers are not recognized."""
    folder = make_checkpoint(tmp_path, "falcon_h1", num_layers=2, pad_token_id=pad_token_id)
    monkeypatch.setattr(mixers, "CACHE_METHODS", ())
    assert "of type hybrid: the recurrent state" in check(config(folder), has_weights=False).reason
    monkeypatch.setattr(models, "WITH_STATES", {})
    found = check(config(folder), has_weights=False)
    assert found.reason or (found.is_exact, found.exactness_note) == (None, "the weights were not read")
    assert "depends on more of a token" in check(config(folder), has_weights=True).reason


def test_with_weights_the_model_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    found = check(config(folder), has_weights=True)
    assert (found.reason, found.is_exact, found.exactness_note) == ("", True, "")
    found = check(config(folder), has_weights=False)
    assert (found.reason, found.is_exact, found.exactness_note) == ("", None, "the weights were not read")
    monkeypatch.setattr("workers.compat_check.check_exact", lambda *_: "not verified: no memory")
    found = check(config(folder), has_weights=True)
    assert (found.reason, found.is_exact, found.exactness_note) == ("", None, "not verified: no memory")


def test_coordinator_requirements_are_checked(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    found = check_text(folder)
    assert (found.reason, found.architecture, found.max_positions) == ("", "Qwen3ForCausalLM", 8192)
    assert found.has_chat_template
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in check_text(folder).reason


@pytest.mark.extended
async def test_output_for_a_planned_cluster_a_running_cluster_and_a_refusal(terminal: Terminal, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "small", "gemma2")
    per_token = 4 * 2 * 2 * 16 * 4
    options = ("models", "check", str(folder), "--world-size", "3", "--kv-bytes", str(1000 * per_token))
    code, out, _ = await terminal.plain(*options)
    assert code == 0
    message = "small is supported (Gemma2ForCausalLM, float32); exactness unknown: the weights were not read"
    assert message in " ".join(out.split())
    assert "the weights were not read; --load" in out
    assert read_fingerprint(folder).digest in out
    replicated = "512 B per token, and 128.0 KiB on each rank for each end of a context, with --window-keys replicated"
    assert replicated in " ".join(out.split())
    assert "nothing: kv_bytes: a context and a generation need" in " ".join(out.split())
    assert all(words in out for words in ("256 tokens", "all previous tokens", "2,688 tokens on 3 ranks", "1.0 KiB"))
    assert "with --window-keys sharded" in " ".join(out.split())
    code, out, _ = await terminal.run("models", "check", str(folder), "--kv-dtype", "int8", "--json")
    found = json.loads(out)
    pool, per_token = terminal.engine.cluster().workers[0].max_kv_bytes, 4 * 2 * (2 * 16 + 4) + 4 * 2 * 16 // 128
    assert (code, found["is_supported"], found["attention"]["bytes_per_token"]) == (0, True, per_token)
    assert found["fingerprint"] == to_builtins(read_fingerprint(folder))
    sharded = found["attention"]["plans"][0]
    assert sharded["rooms"] == [{"rank": 0, "kv_bytes": pool, "tokens": pool // (128 * per_token) * 128}]
    pools = ("--kv-bytes", str(4 << 20), "--window-bytes", str(1 << 20), "--world-size", "2")
    code, out, _ = await terminal.plain("models", "check", str(folder), *pools)
    message = "12,288 tokens on 2 ranks: 6,144 in 4.0 MiB each; 4 ends of contexts, 2,048 tokens on each rank, with"
    assert (code, message in " ".join(out.split())) == (0, True)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    code, out, _ = await terminal.plain("models", "check", str(folder))
    assert (code, "fingerprint: none" in out, "it ends before the end of its tensor" in " ".join(out.split())) == (
        0,
        True,
        True,
    )
    (folder / "tokenizer.json").unlink()
    code, out, _ = await terminal.plain("models", "check", str(folder))
    assert (code, "small is not supported: " in out, "tokenizer.json" in out) == (2, True, True)
    code, _, err = await terminal.plain("models", "check", str(tmp_path / "nowhere"))
    assert (code, "is not a folder" in err) == (2, True)


@pytest.mark.parametrize(
    ("layers", "message"),
    [((0,), "0"), ((0, 1, 2, 5), "0-2 5"), (tuple(range(0, 30, 2)), "0 2 4 … 28"), (tuple(range(64)), "0-63")],
)
def test_layer_ranges_are_abbreviated(layers: tuple[int, ...], message: str) -> None:
    assert spans(layers) == message


def test_recurrent_states_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_next")
    sizes = replace(config(folder), kv_bytes=8 << 20, state_bytes=1 << 20)
    found = check(sizes, has_weights=False)
    assert found.states == StateReport(layers=(0, 1, 2), num_bytes=36_864)
    [plan] = found.plans
    assert (plan.num_states, plan.ends, plan.window_tokens) == (28, 27, 0)
    show(ModelReport(model="small", is_supported=True, text=TextReport(), attention=found), is_running=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "recurrent states 36.0 KiB for each end of a context (3 layers, 0-2)" in printed
    assert "28 recurrent states on each rank, for 27 contexts of one document" in printed


@pytest.mark.parametrize("has_weights", [False, True])
def test_layers_with_two_formulas_are_not_reported_exact(tmp_path: Path, *, has_weights: bool) -> None:
    """The comparison passes, and some single rows follow another formula than in `generate`."""
    folder = make_checkpoint(tmp_path, "nemotron_h")
    found = check(config(folder), has_weights=has_weights)
    verdict = "; exactness unknown: the weights were not read; --load compares it with plain attention"
    if has_weights:
        layers = describe_layers(found.states.layers if found.states else ())
        verdict = f"; not exact: {layers}: transformers computes single rows by another formula"
    assert (found.reason, found.is_exact) == ("", False if has_weights else None)
    assert exactness_of(found) == verdict
