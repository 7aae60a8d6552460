"""Models that the worker refuses to load, and the properties that it derives from a model before serving it."""

import re

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CLIPConfig,
    DeepseekV4Config,
    DeepseekV32Config,
    EncodecConfig,
    Glm5NextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    MusicgenConfig,
    MusicgenDecoderConfig,
    PaliGemmaConfig,
    PreTrainedConfig,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    UdopConfig,
)

from coordinator.engine.engine import Engine
from coordinator.engine_messages import Prompt, Tokens
from longleaf.errors import InvalidArgument, ModelRefused
from longleaf.positions import AttentionSpan
from longleaf.sampling import SamplingParams
from tests.support.running import running
from tests.support.threads import ThreadRanks, config_for
from workers.model import hook, mixers, model
from workers.model.model import Probe, probe_ids, reach_of
from zoo.checkpoints import PAD_IDS, make_checkpoint
from zoo.classes import KINDS, write_small
from zoo.families import SECTION, WINDOW

IDS = (5, 6, 5)
Q = torch.tensor(IDS, dtype=torch.float32)[:, None].expand(1, 2, 3, 8)
K = Q[:, :1]


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def layer(number: int = 0) -> torch.nn.Module:
    module = torch.nn.Module()
    module.layer_idx = number
    return module


def probe() -> Probe:
    return Probe(LlamaConfig(), IDS)


def test_model_that_ignores_the_hook_is_refused(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="0 of 2 layers"):
        model.load(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    "feature",
    [{"position_bias": torch.zeros(3, 3)}, {"sinks": torch.zeros(2)}, {"s_aux": torch.zeros(3, 2)}],
    ids=lambda feature: next(iter(feature)),
)
def test_wrong_attention_is_refused(feature):
    hook.attention(layer(), Q, K, K, None, step=probe().attend, softcap=3.0, s_aux=torch.zeros(2))
    with pytest.raises(ModelRefused, match="not supported"):
        hook.attention(layer(), Q, K, K, None, step=probe().attend, **feature)


def test_step_is_passed_with_the_positions():
    seen = probe()
    positions = hook.arguments(seen.attend, torch.zeros(3), torch.arange(3), has_offsets=False)["position_ids"]
    hook.attention(layer(4), Q, K, K, None, position_ids=positions)
    assert seen.layers.keys() == {4}
    with pytest.raises(TypeError, match="neither the step nor the positions"):
        hook.attention(layer(4), Q, K, K, None, position_ids=torch.arange(3)[None])


@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((5.0, 6.0, 7.0), "depends on more of a token"),
        ((0.0, 6.0, 0.0), "that are zero"),
        ((0.0, 0.0, 0.0), "that are zero"),
        ((5.0, 5.0, 5.0), "the same .* for all tokens"),
        ((5.0, torch.nan, 5.0), "non-finite"),
        ((torch.inf, 6.0, torch.inf), "non-finite"),
    ],
)
def test_inconclusive_or_mixed_rows_are_refused(spoiled, rows, words):
    tensors = {"query": Q, "key": K, "value": K}
    tensors[spoiled] = torch.tensor(rows)[None, None, :, None].expand(tensors[spoiled].shape)
    with pytest.raises(ModelRefused, match=f"attention layer 0 .*{words}"):
        hook.attention(layer(), *tensors.values(), None, step=probe().attend)


@pytest.mark.parametrize("value", [0.0, 1.0, torch.nan])
def test_embeddings_that_do_not_distinguish_tokens_are_refused(tmp_path, value):
    plain = LlamaForCausalLM(LlamaConfig(**SMALL))
    torch.nn.init.constant_(plain.get_input_embeddings().weight, value)
    plain.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="embeddings of its tokens are zero, identical or not finite"):
        model.load(str(tmp_path), "float32", "cpu")


def test_preflight_uses_ordinary_distinct_tokens():
    config = LlamaConfig(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=[2, 32], image_token_id=16)
    plain = LlamaForCausalLM(config)
    embeddings = plain.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[3:20] = embeddings[3]
        embeddings[40:50] = 0
    found = probe_ids(plain, 64)
    assert found == [3, *range(20, 32), *range(33, 40), *range(50, 64)]
    assert set(probe_ids(plain, 4)) < set(found)


@pytest.mark.parametrize(
    ("settings", "window", "reach"),
    [
        ({}, None, AttentionSpan()),
        ({}, 7, AttentionSpan(7)),
        ({"layer_types": ["sliding_attention"]}, 7, AttentionSpan(7)),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 9}, None, AttentionSpan(section=9)),
        ({"layer_types": ["full_attention"], "attention_chunk_size": 9}, None, AttentionSpan()),
    ],
)
def test_attention_span_is_derived_from_call_and_config(settings, window, reach):
    assert reach_of(PreTrainedConfig(**settings, num_hidden_layers=1), 0, window) == reach


@pytest.mark.parametrize(
    ("kind", "window"), [("sliding_attention", None), ("full_attention", 7), ("chunked_attention", None)]
)
def test_contradictory_attention_span_is_refused(kind, window):
    with pytest.raises(ModelRefused, match=f"attention layer 0 has type {kind}"):
        reach_of(PreTrainedConfig(layer_types=[kind], num_hidden_layers=1), 0, window)


def test_config_window_that_no_layer_uses_is_refused():
    """PhiMoE applies it only in its masks, which are not built."""
    config = PreTrainedConfig(sliding_window=8, num_hidden_layers=1, max_position_embeddings=16)
    with pytest.raises(ModelRefused, match="sliding_window is 8, but attention layer 0 uses no window"):
        reach_of(config, 0, None)
    assert reach_of(config, 0, 8) == AttentionSpan(8)
    config.sliding_window = 16
    assert reach_of(config, 0, None) == AttentionSpan()


@pytest.mark.parametrize(
    ("family", "reaches"),
    [
        ("mistral", [AttentionSpan(WINDOW)] * 4),
        ("qwen2", [AttentionSpan()] * 2 + [AttentionSpan(WINDOW)] * 2),
        ("gemma3", [AttentionSpan(WINDOW), AttentionSpan()] * 2),
        ("llama4", [AttentionSpan(section=SECTION)] * 3 + [AttentionSpan()]),
    ],
)
def test_loaded_model_has_attention_spans(tmp_path, family, reaches):
    loaded = model.load(str(make_checkpoint(tmp_path, family)), "float32", "cpu")
    assert [spec.reach for spec in loaded.layers.values()] == reaches


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma3_images", "Gemma3TextModel"),
        ("mistral3", "Ministral3Model"),
        ("qwen3_vl", "Qwen3VLTextModel"),
        ("kimi_k25", "DeepseekV3Model"),
        ("step3p7", "Step3p7TextModel"),
        ("muse_glimmer", "MuseGlimmerTextModel"),
    ],
)
def test_text_part_of_an_image_model_is_served(tmp_path, family, name):
    """The golden tests check its exactness."""
    loaded = model.load(str(make_checkpoint(tmp_path, family)), "float32", "cpu")
    assert (type(loaded.decoder).__name__, len(loaded.layers)) == (name, 4)


def test_text_part_of_a_checkpoint_of_another_class_is_served(tmp_path):
    """Emu3ForCausalLM finds none of the weights of the text in a checkpoint that also sees images."""
    write_small(KINDS["emu3"], tmp_path)
    loaded = model.load(str(tmp_path), "float32", "cpu")
    assert (type(loaded.decoder).__name__, len(loaded.layers)) == ("Emu3TextModel", 4)


def test_output_layer_is_not_used_as_the_decoder(tmp_path):
    """transformers returns the module named `decoder`; in ModernBERT it is the projection to the vocabulary."""
    config = ModernBertDecoderConfig(**SMALL, pad_token_id=2, cls_token_id=0, sep_token_id=1)
    ModernBertDecoderForCausalLM(config).save_pretrained(tmp_path)
    loaded = model.load(str(tmp_path), "float32", "cpu")
    assert type(loaded.decoder).__name__ == "ModernBertDecoderModel"


def test_model_without_a_separable_decoder_is_refused(tmp_path, monkeypatch):
    """All ranks but the first run it without its head."""
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "get_decoder", lambda plain: plain.model.embed_tokens)
    with pytest.raises(ModelRefused, match="Embedding cannot run on such steps"):
        model.load(str(tmp_path), "float32", "cpu")


def test_model_that_attends_to_the_whole_prompt_is_refused(tmp_path):
    PaliGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="not causal"):
        model.load(str(tmp_path), "float32", "cpu")


def test_positions_offset_by_the_padding_token_are_refused(tmp_path):
    """RoBERTa as a decoder: the first position is the one after the id of the padding token."""
    config = RobertaConfig(**SMALL, is_decoder=True, pad_token_id=2, bos_token_id=0, eos_token_id=1)
    RobertaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="RobertaModel: embeddings counts positions from the padding token"):
        model.load(str(tmp_path), "float32", "cpu")


def test_config_with_an_ambiguous_text_part_is_refused(tmp_path):
    MusicgenConfig(
        text_encoder=T5Config().to_dict(),
        audio_encoder=EncodecConfig().to_dict(),
        decoder=MusicgenDecoderConfig().to_dict(),
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="Multiple valid text configs were found"):
        model.load(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize("model_type", ["bart", "blt", "mllama"])
def test_cross_attention_decoder_is_refused_by_name(tmp_path, model_type):
    write_small(KINDS[model_type], tmp_path)
    with pytest.raises(ModelRefused, match=r"attends to an encoder \(cross-attention\), which is not supported"):
        model.load(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize("kind", [CLIPConfig, T5Config, UdopConfig])
def test_config_without_a_causal_language_model_is_refused(tmp_path, kind):
    kind().save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=f"no causal language model of type {kind.model_type}"):
        model.load(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DeepseekV32Config(), "layers of type indexed_attention (a learned indexer) are not supported"),
        (DeepseekV4Config(), "heavily_compressed_attention (compressed keys)"),
        (Glm5NextConfig(), "layers of type indexed_attention (a learned indexer) are"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_other_layer_types_are_refused_by_name(tmp_path, config, words):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=re.escape(words)):
        model.read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mamba", "no layer attends; models without attention are not served"),
        ("minimax", "layers 0, 1 and 2 of type linear_attention: the recurrent state is not in the cache"),
        ("zamba2", "attends twice"),
        ("zaya", "ZayaCCAProjection: its state is not supported"),
        ("recurrent_gemma", "layers 0, 1 and 3 of type linear_attention: the recurrent state is not in the cache"),
    ],
)
def test_states_of_other_forms_are_refused(tmp_path, family, words):
    with pytest.raises(ModelRefused, match=words):
        model.load(str(make_checkpoint(tmp_path, family)), "float32", "cpu")


def test_family_with_irreplaceable_attention_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match="cannot be replaced"):
        model.load(str(make_checkpoint(tmp_path, "gptj")), "float32", "cpu")


@pytest.mark.parametrize("pad_token_id", PAD_IDS)
@pytest.mark.parametrize("family", ["falcon_h1", "zaya"])
def test_stateful_model_is_refused_regardless_of_padding(tmp_path, monkeypatch, family, pad_token_id):
    """It is refused even if the config does not name its layer types, and its mixers are not recognized."""
    monkeypatch.setattr(model, "WITH_STATES", {})
    monkeypatch.setattr(mixers, "CACHE_METHODS", ())
    folder = make_checkpoint(tmp_path, family, num_layers=2, pad_token_id=pad_token_id)
    with pytest.raises(ModelRefused, match="depends on more of a token than its id and its position"):
        model.load(str(folder), "float32", "cpu")


async def test_position_limit_is_the_size_of_learned_positions(tmp_path):
    """The worker checks the size of the table, independently of the coordinator's limit from the config."""
    config = config_for(make_checkpoint(tmp_path, "gpt2", max_positions=80), block_size=16)
    engine = Engine(ThreadRanks(config), config, max_positions=1 << 20)

    def ask(num_tokens: int):
        sampling = SamplingParams(max_tokens=10, ignore_end_token=True)
        return engine.submit(Prompt(context=None, token_ids=tuple(range(3, 3 + num_tokens)), sampling=sampling))

    async with running(engine):
        assert engine.max_positions == 80
        assert sum([len(event.token_ids) async for event in ask(71) if isinstance(event, Tokens)]) == 10
        with pytest.raises(InvalidArgument, match="limit is 80 positions"):
            ask(72)
