"""The embedded model as a compact training module; its parameter names are those of SmolLM3ForCausalLM."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 128, 4, 4, 2, 64, 352
VOCAB, WINDOW, THETA, EPS = 264, 32, 500.0, 1e-6
REACH = (LAYERS - 1) * (WINDOW - 1)
"""How many tokens back the input of the global layer depends on."""


def rotary(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions 0 to `length` - 1, each [length, HEAD_DIM]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions applied to `x` [batch, heads, length, HEAD_DIM]."""
    low, high = x.chunk(2, dim=-1)
    return x * tables[0] + torch.cat((-high, low), dim=-1) * tables[1]


def band_mask() -> Tensor:
    """The mask of a block of WINDOW queries over the previous block and itself, [WINDOW, 2 * WINDOW]."""
    distance = torch.arange(WINDOW)[:, None] + WINDOW - torch.arange(2 * WINDOW)[None]
    return (distance >= 0) & (distance < WINDOW)


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the last WINDOW positions, computed in blocks; the length must be a multiple of WINDOW."""
    batch, heads, length, dim = q.shape
    blocks = length // WINDOW
    group = heads // k.shape[1]
    q = q.reshape(batch, heads, blocks, WINDOW, dim)

    def with_previous(x: Tensor) -> Tensor:
        x = x.repeat_interleave(group, dim=1)
        x = F.pad(x, (0, 0, WINDOW, 0)).reshape(batch, heads, blocks + 1, WINDOW, dim)
        return torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3)

    mask = band_mask().repeat(blocks, 1, 1)
    mask[0, :, :WINDOW] = False
    scores = q @ with_previous(k).transpose(-1, -2) / math.sqrt(dim)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return (weights @ with_previous(v)).reshape(batch, heads, length, dim)


def split_heads(x: Tensor) -> Tensor:
    """From [batch, length, heads * HEAD_DIM] to [batch, heads, length, HEAD_DIM]."""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


class Attention(nn.Module):
    """Projections of one attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads, length, HEAD_DIM]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return split_heads(q), split_heads(k), split_heads(v)

    def output(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = FeedForward()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)

    def local(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The layer with a sliding window and rotary positions."""
        q, k, v = self.self_attn.project(self.input_layernorm(x))
        return self.finish(x, local_attention(rotate(q, tables), rotate(k, tables), v))

    def full(self, x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Outputs [rows, HIDDEN] of the layer with full attention and no positions, at some rows of `x` [N, HIDDEN].

        `mask` [rows, N] is added to the scores. The query heads of a key head are packed into the query axis.
        """
        normed = self.input_layernorm(x)
        group = HEADS // KV_HEADS
        q = self.self_attn.q_proj(normed[rows]).view(len(rows), KV_HEADS, group, HEAD_DIM)
        packed = q.permute(1, 2, 0, 3).reshape(1, KV_HEADS, group * len(rows), HEAD_DIM)
        k, v = (
            project(normed).view(-1, KV_HEADS, HEAD_DIM).transpose(0, 1)[None]
            for project in (self.self_attn.k_proj, self.self_attn.v_proj)
        )
        mixed = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask.repeat(group, 1)[None, None])
        mixed = mixed.view(KV_HEADS, group, len(rows), HEAD_DIM).permute(2, 0, 1, 3).flatten(1)
        x = x[rows] + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)


class EmbeddedModel(nn.Module):
    """Three local layers below one global layer, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.05 if "embed" in name else 0.7 / math.sqrt(parameter.shape[1])
                deep = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=scale / math.sqrt(2 * LAYERS) if deep else scale)

    def layers(self) -> list[Layer]:
        """The layers, typed."""
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def local_layers(self, ids: Tensor) -> Tensor:
        """Input of the global layer for ids [batch, length], [batch, length, HIDDEN]; any length."""
        length = ids.shape[1]
        x = self.model.embed_tokens(F.pad(ids, (0, -length % WINDOW)))
        tables = rotary(x.shape[1])
        for layer in self.layers()[:-1]:
            x = layer.local(x, tables)
        return x[:, :length]

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, ids: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Logits [rows, VOCAB] at some rows of the flattened `ids` [batch, length].

        `mask` [rows, batch * length] is added to the global layer's scores: it may see all sequences.
        """
        return self.logits(self.layers()[-1].full(self.local_layers(ids).flatten(0, 1), rows, mask))


def export_weights(model: EmbeddedModel, path: Path) -> None:
    """Writes the weights under the names that transformers reads."""
    tensors = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_weights(path: Path) -> EmbeddedModel:
    """The model with the weights that `export_weights` wrote."""
    model = EmbeddedModel()
    model.load_state_dict(load_file(path))
    return model
