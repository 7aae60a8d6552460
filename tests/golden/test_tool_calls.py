"""A checkpoint that calls a tool, on ranks that compute, behind the gateway.

Its attention and its MLPs add nothing, so the next token depends only on the last one: the weights of the output layer
are a chain of tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.chat_templates import HERMES
from tests.support.golden.behind_gateway import behind_gateway
from tests.support.service import END, byte_tokenizer

CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
PIECES = ("<think>", "They ask.", "</think>", "<tool_call>", CALL, "</tool_call>")
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
HIDDEN = 320


def make_caller(folder: Path) -> Path:
    """After a line break the model reasons, calls the tool, and ends."""
    fast = byte_tokenizer()
    fast.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])  # pyright: ignore[reportUnknownMemberType]
    fast.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in PIECES])  # pyright: ignore[reportUnknownMemberType]
    size = fast.get_vocab_size()
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        eos_token_id=fast.token_to_id(END),
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    line = fast.encode("\n").ids[0]
    chain = [line, *(fast.token_to_id(piece) for piece in PIECES), fast.token_to_id(END)]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, HIDDEN))
        model.lm_head.weight.zero_()
        for before, after in zip(chain, chain[1:], strict=False):
            model.lm_head.weight[after, before] = 10.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    fast.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": END, "chat_template": HERMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def test_model_calls_a_tool_through_the_gateway(tmp_path: Path) -> None:
    async with behind_gateway(make_caller(tmp_path / "model")) as service:
        client, model = service.client, service.model
        question: Any = {"role": "user", "content": "Is it cold?"}
        answer = await client.chat.completions.create(model=model, messages=[question], tools=[WEATHER])
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
        assert message.model_extra == {"reasoning_content": "They ask."} and message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens == len(PIECES) + 1  # the end token
        assert answer.usage.completion_tokens_details.reasoning_tokens == 3
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        history: Any = [question, message.model_dump(exclude_none=True), result]
        again = await client.chat.completions.create(model=model, messages=history, tools=[WEATHER], n=2)
        assert [choice.finish_reason for choice in again.choices] == ["tool_calls"] * 2
        ids = [choice.message.tool_calls[0].id for choice in again.choices if choice.message.tool_calls]
        assert len(set(ids)) == 2
