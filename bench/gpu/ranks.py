"""Ranks with random models that are made where they compute, without a checkpoint."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from longleaf.config import EngineConfig
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from workers.cuda_graphs.graphs import CaptureRefused, Graphs, Work
from workers.model import hook, model
from workers.rank import Rank

T = TypeVar("T")
NOBODY = ConnectInfo(address="", server_key=b"", public_key=b"", secret_key=b"")
TRAINED = 131_072
"""The training length in positions that models declare, as Llama-3.1-8B does. Positions beyond it cost the same."""


class Shape(NamedTuple):
    """The shape of a Llama."""

    num_layers: int = 32
    hidden: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    dim: int = 128
    ffn: int = 14336
    vocabulary: int = 128_256
    spread: float = 0.02
    """Standard deviation of the weights. With as little as that, small models repeat a few tokens for ever."""

    @property
    def num_weights(self) -> int:
        """Numbers in all matrices of it."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        layer = self.hidden * (heads * self.dim + 3 * self.ffn)
        return self.num_layers * layer + 2 * self.vocabulary * self.hidden

    @property
    def num_stored(self) -> int:
        """Numbers that are kept of each token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.dim


LLAMA_8B = Shape()
"""That of Llama-3.1-8B."""
SMALL = Shape(num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, dim=32, ffn=512, vocabulary=512, spread=0.2)


def make_module(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, on the device: of equal seeds, equal ones. It attends as transformers does."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.dim,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocabulary,
        initializer_range=shape.spread,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []), torch.device(device):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def served(module: PreTrainedModel, device: str) -> model.Model:
    """The module, made ready for ranks."""
    hook.register()
    module.set_attn_implementation(hook.NAME)
    return model.prove(module, device)


def make_rank(config: EngineConfig, number: int = 0, gpu: int = 0) -> Rank:
    """A rank of this machine. If it uses a GPU, it uses that of this number, even if that is shared."""
    return Rank(
        RankSpec(
            member=number,
            config=config,
            invitation=NOBODY,
            host="127.0.0.1",
            node="here",
            num_ranks_here=config.world_size,
            gpu=gpu,
            num_ranks_seeing=config.world_size,
        )
    )


class NotedGraphs:
    """The graphs of a rank, and a record of their captures and replays. Implements Graphs."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self.num_captured = 0
        self.num_replayed = 0
        self.refusal = ""
        """Why something was not captured."""

    def check_room(self) -> None:
        self._noting(self._graphs.check_room)

    def capture(self, work: Work) -> Work:
        replay = self._noting(lambda: self._graphs.capture(work))
        self.num_captured += 1

        def replayed() -> None:
            self.num_replayed += 1
            replay()

        return replayed

    def release(self) -> None:
        self._graphs.release()

    def _noting(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except CaptureRefused as error:
            self.refusal = str(error)
            raise


def noted(rank: Rank) -> NotedGraphs | None:
    """Makes a laid-out rank record the use of its graphs; None if it has none."""
    if rank.graphs is None:
        return None
    rank.graphs = found = NotedGraphs(rank.graphs)
    return found
