"""Decode steps of transformers alone, over a cache that is there: what a step of ours is held against.

They are what `generate` does for a greedy token, without what it asks of the host each time: a forward pass over the
token before, and the likeliest token of its logits. Nothing is compiled. The host waits for the last step only.
"""

import gc
import time
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

Row = dict[str, Any]


class Plain:
    """A model of transformers, one row at a time. It is left with the attention that was tried last."""

    def __init__(self, module: PreTrainedModel, device: str) -> None:
        self._module = module
        self._device = device

    def measure(self, num_keys: int, warm_up: int, num_steps: int) -> Row:
        """The fastest attention and cache that are available, by name, with its milliseconds, and the times of the
        others; `reason` instead if none works."""
        took: dict[str, float] = {}
        failed: dict[str, str] = {}
        for attention, cache in ways():
            name = f"{attention}, {cache}"
            try:
                took[name] = round(self._milliseconds(attention, cache, num_keys, warm_up, num_steps), 3)
            except Exception as error:  # an error means that this version does not support it, or lacks memory
                failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if not took:
            return {"reason": "; ".join(f"{name}: {why}" for name, why in failed.items())}
        best = min(took, key=took.__getitem__)
        return {"ms": took[best], "way": best, "others": {**took, **failed}}

    @torch.inference_mode()
    def _milliseconds(self, attention: str, cache: str, num_keys: int, warm_up: int, num_steps: int) -> float:
        """Of a step, on average."""
        self._module.set_attn_implementation(attention)
        resident = self._filled(cache, num_keys, warm_up + num_steps)
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        for _ in range(warm_up):
            token_11 = self._step(token_11, resident)
        self._wait()
        begin = time.perf_counter()
        for _ in range(num_steps):
            token_11 = self._step(token_11, resident)
        self._wait()
        return (time.perf_counter() - begin) / num_steps * 1e3

    def _step(self, token_11: Tensor, held: Cache) -> Tensor:
        module: Any = self._module
        logits_1TV = module(token_11, past_key_values=held, use_cache=True, return_dict=True).logits
        return logits_1TV[:, -1:].argmax(dim=-1)

    def _filled(self, cache: str, num_keys: int, num_steps: int) -> Cache:
        """A cache of so many random keys and values, and room for those of the steps."""
        config = self._module.config
        sizes = (1, config.num_key_value_heads, num_keys, config.head_dim)
        made: Cache
        if cache == "DynamicCache":
            made = DynamicCache(config=config)
            for layer in range(config.num_hidden_layers):
                keys, values = (torch.randn(sizes, dtype=self._module.dtype, device=self._device) for _ in range(2))
                made.update(keys, values, layer)
            return made
        made = StaticCache(config=config, max_cache_len=num_keys + num_steps)
        device = torch.device(self._device)
        made.early_initialization(1, config.num_key_value_heads, config.head_dim, self._module.dtype, device)
        for each in made.layers:
            resident: Any = each
            resident.keys.normal_()
            resident.values.normal_()
            resident.cumulative_length.fill_(num_keys)
        return made

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(self._device)


def ways() -> list[tuple[str, str]]:
    """Attention and cache of transformers, those that may be the fastest. Flash kernels would need masks over a cache
    of fixed size."""
    found = [("sdpa", "StaticCache"), ("sdpa", "DynamicCache")]
    found += [("flash_attention_2", "DynamicCache")] * is_flash_attn_2_available()
    return found + [("flash_attention_3", "DynamicCache")] * is_flash_attn_3_available()
