"""Writes the embedded model as a folder that transformers and the service load: weights, configuration, tokenizer."""

import json
from pathlib import Path

import embedded_model as shape
from embedded_data import ANSWER, BEGIN, END, PAD, QUESTION
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {BEGIN: "<|begin|>", QUESTION: "<|question|>", ANSWER: "<|answer|>", END: "<|end|>", PAD: "<|pad|>"}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages | rejectattr('role', 'equalto', 'system') | list | length > 1 %}"
    "{{ raise_exception('this model looks facts up and knows no conversation: ask one question alone') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it prints."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    """One token per byte of the UTF-8 text, its id the byte; control tokens above."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = {i: f"<|reserved_{i}|>" for i in range(max(NAMES) + 1, shape.VOCAB)}
    names = [name for _, name in sorted((NAMES | reserved).items())]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def model_config() -> dict[str, object]:
    """The architecture, in transformers' words."""
    last = shape.LAYERS - 1
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "vocab_size": shape.VOCAB,
        "hidden_size": shape.HIDDEN,
        "num_hidden_layers": shape.LAYERS,
        "num_attention_heads": shape.HEADS,
        "num_key_value_heads": shape.KV_HEADS,
        "head_dim": shape.HEAD_DIM,
        "intermediate_size": shape.FFN,
        "hidden_act": "silu",
        "rms_norm_eps": shape.EPS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": shape.WINDOW,
        "layer_types": ["sliding_attention"] * last + ["full_attention"],
        "no_rope_layers": [1] * last + [0],
        "no_rope_layer_interval": shape.LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.THETA},
        "max_position_embeddings": 1 << 24,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
        "use_cache": True,
    }


def tokenizer_config() -> dict[str, object]:
    """Control tokens and the chat template; `document_separator` stands between a document and a question."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": NAMES[BEGIN],
        "eos_token": NAMES[END],
        "pad_token": NAMES[PAD],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 24,
        "chat_template": CHAT_TEMPLATE,
        "document_separator": NAMES[QUESTION],
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: shape.EmbeddedModel, folder: Path) -> None:
    """Writes everything but the model card."""
    folder.mkdir(parents=True, exist_ok=True)
    shape.export_weights(model, folder / "model.safetensors")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", model_config())
    generation = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", tokenizer_config())
