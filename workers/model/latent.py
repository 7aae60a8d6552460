"""DeepSeek-V3's latent attention in absorbed form: of each token only its latent and its rotary key are kept.

The model makes the keys and values of all heads from one latent c of a token: W_K c and W_V c, beside a rotary key r
that the heads share. With a head's query (q, p), of which p is rotated,

    score   q . (W_K c) + p . r  =  (W_K^T q, p) . (c, r)
    output  sum of weights times W_V c  =  W_V (sum of weights times c)

so the layer attends with queries (W_K^T q, p) to a single key head (c, r) whose values are its first dims, and W_V
follows the merge. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Layers are swapped, and the forward pass of
transformers runs in them: docs/adr/0009-latents-in-swapped-layers.md.

Shape letters: H heads, N and V dims of a head's unrotated key and of its value, L dims of the latent, R of the rotary
key.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from longleaf.errors import ModelRefused
from workers.model import hook


class LatentQueries(nn.Module):
    """The layer's projection to queries [..., H * (N + R)], and on to queries of latents [..., H * (L + R)]."""

    def __init__(self, projection: nn.Module, plain: DeepseekV3Attention) -> None:
        super().__init__()
        self.projection = projection
        self.kv_b_proj = plain.kv_b_proj
        self.sizes = (plain.num_heads, plain.qk_nope_head_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        num_heads, key_dim = self.sizes
        weight = self.kv_b_proj.weight.to(hidden.dtype)  # the same tensor, but while others are converted
        key_HNL = weight.unflatten(0, (num_heads, -1))[:, :key_dim]
        query = self.projection(hidden).unflatten(-1, (num_heads, -1))
        latent = torch.einsum("...hn,hnl->...hl", query[..., :key_dim], key_HNL)
        return torch.cat((latent, query[..., key_dim:]), dim=-1).flatten(-2)


class LatentOutputs(nn.Module):
    """From the heads' means of latents [..., H * L] to their means of values, and on by the layer's projection."""

    def __init__(self, projection: nn.Module, plain: DeepseekV3Attention) -> None:
        super().__init__()
        self.projection = projection
        self.kv_b_proj = plain.kv_b_proj
        self.sizes = (plain.num_heads, plain.qk_nope_head_dim)

    def forward(self, latent: Tensor) -> Tensor:
        num_heads, key_dim = self.sizes
        weight = self.kv_b_proj.weight.to(latent.dtype)
        value_HVL = weight.unflatten(0, (num_heads, -1))[:, key_dim:]
        mean = torch.einsum("...hl,hvl->...hv", latent.unflatten(-1, (num_heads, -1)), value_HVL)
        return self.projection(mean.flatten(-2))


class LatentAttention(DeepseekV3Attention):
    """The layer `plain`, with its weights, over one key head of latent and rotary key.

    Under another attention function than the hook it is `plain` itself, for comparisons.
    """

    def __init__(self, plain: DeepseekV3Attention) -> None:
        with torch.device("meta"):  # no room for weights that are replaced at once
            super().__init__(plain.config, plain.layer_idx)
        for name, part in plain.named_children():
            setattr(self, name, part)
        self.plain = plain
        queries = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        setattr(self, queries, LatentQueries(getattr(plain, queries), plain))
        self.o_proj = LatentOutputs(plain.o_proj, plain)
        self.qk_nope_head_dim = self.v_head_dim = self.kv_lora_rank
        self.qk_head_dim = self.kv_lora_rank + self.qk_rope_head_dim

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [1, 1, T, L + R] and values [1, 1, T, L], which lie in them: nothing is expanded."""
        keys = torch.cat((kv_nope, k_rot), dim=-1)
        return keys, keys[..., : self.kv_lora_rank]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.config._attn_implementation != hook.NAME:
            return self.plain(*inputs, **options)
        return super().forward(*inputs, **options)


def absorb(model: PreTrainedModel) -> None:
    """Swaps the latent attention layers of a model. Raises ModelRefused where W_K and W_V are no plain weights."""
    for name, part in list(model.named_modules()):
        if type(part) is DeepseekV3Attention:
            if type(part.kv_b_proj) is not nn.Linear:
                raise ModelRefused(
                    f"attention layer {part.layer_idx}: kv_b_proj is {part.kv_b_proj}, not plain weights"
                )
            model.set_submodule(name, LatentAttention(part))
