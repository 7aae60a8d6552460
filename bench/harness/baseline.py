"""The same work in plain transformers: its default cache and attention, one thread, the end token switched off."""

import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

from bench.harness.timing import Decoded


class Clock(BaseStreamer):
    """Notes when each token comes out of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Baseline:
    """A transformers model in this process."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.max_length = None

    @torch.inference_mode()
    def prefill(self, ids: list[int], chunk_size: int) -> DynamicCache:
        """Reads `ids` chunk by chunk, with the logits of one token per chunk."""
        cache = DynamicCache(config=self._model.config)
        for start in range(0, len(ids), chunk_size):
            chunk = torch.tensor(ids[start : start + chunk_size])[None]
            self._model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def prefill_seconds(self, ids: list[int], chunk_size: int) -> float:
        """The duration of `prefill`."""
        begin = time.perf_counter()
        self.prefill(ids, chunk_size)
        return time.perf_counter() - begin

    @torch.inference_mode()
    def random_cache(self, num_tokens: int) -> DynamicCache:
        """A cache of the right sizes with random content: the speed of decoding does not depend on the values."""
        cache = self.prefill([0], 1)
        generator = torch.Generator().manual_seed(0)
        for i, layer in enumerate(cache.layers):
            keys: Tensor = layer.keys  # pyright: ignore
            batch, heads, _, dim = keys.shape
            more = torch.randn(2, batch, heads, num_tokens - 1, dim, generator=generator).to(keys.dtype)
            cache.update(more[0], more[1], i)
        return cache

    @torch.inference_mode()
    def prefill_batch(self, contexts: list[list[int]], chunk_size: int) -> DynamicCache:
        """One cache of several contexts of equal length; a context that repeats is read once."""
        if all(ids == contexts[0] for ids in contexts):
            cache = self.prefill(contexts[0], chunk_size)
            if len(contexts) > 1:  # recurrent states cannot be repeated
                cache.batch_repeat_interleave(len(contexts))
            return cache
        cache = DynamicCache(config=self._model.config)
        for start in range(0, len(contexts[0]), chunk_size):
            chunk = torch.tensor([ids[start : start + chunk_size] for ids in contexts])
            self._model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def decode(self, ids: list[int], cache: DynamicCache, num_tokens: int) -> Decoded:
        """Generates greedily from a cache that holds all of `ids` but the last; leaves the cache as it was."""
        return self.decode_together([ids], cache, num_tokens)

    def decode_together(self, ids: list[list[int]], cache: DynamicCache, num_tokens: int) -> Decoded:
        """The same for a batch."""
        clock = Clock()
        used = copy.deepcopy(cache)  # layers with a window cannot be cropped to an earlier length
        begin = time.perf_counter()
        output = self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.ones(len(ids), len(ids[0]), dtype=torch.long),
            past_key_values=used,
            max_new_tokens=num_tokens,
            do_sample=False,
            streamer=clock,
        )
        wall = time.perf_counter() - begin
        token_ids = output[:, len(ids[0]) :].flatten().tolist()
        return Decoded(token_ids, clock.times[-1] - clock.times[-num_tokens], wall, len(ids))
