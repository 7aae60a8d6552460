"""Compares answers of the sharded path with plain attention: the same weights, on one rank, without the hook.

Rank 0 keeps the logits from which an answer's tokens were chosen. When the answer is complete, the same module computes
them again over all its tokens at once, with transformers' eager attention and masks: the KV cache, the kernels, the
merge, the reads and the hook take no part. Eager is the one implementation that every family has and that is complete
(another one drops Gemma 2's soft cap). Where each rank holds a share of the weights, all ranks compute plain attention
together, over replicated rows.

The comparison runs in float32. Where the ranks use a coarser type, plain attention also runs in that type: its distance
from float32 measures the effect of rounding on this model and prompt. A rounding that selects another expert changes
the logits of single tokens a lot, so distances are medians over the tokens.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from longleaf.config import EngineConfig
from longleaf.positions import Rope
from longleaf.rank_protocol.step import Row
from longleaf.rank_protocol.verdict import Verification
from longleaf.sampling import Token
from workers.kv_cache.block_table import BlockTable
from workers.model import hook
from workers.model.mixers import SequenceMixer
from workers.model.model import Model
from workers.sampling.sampler import first_positions
from workers.step.forward import Peers

PLAIN = "eager"
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that can be converted to each other; those of quantized weights cannot."""


class ComparisonResult:
    """The tokens of one sequence, and the logits [V], float32, from which those of its answer were chosen."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.logits: list[Tensor] = []
        self.first_index = 0

    def add(self, row: Row, token_ids: Sequence[int], logits_NV: Tensor) -> None:
        if not self.logits:
            self.first_index = row.token_index
        self.logits += logits_NV.to(torch.float32, copy=True)
        self.token_ids += token_ids


class Verifier:
    """Compares the answers of sequences that request it."""

    def __init__(self, model: Model, block_table: BlockTable, config: EngineConfig, peers: Peers) -> None:
        self._model = model
        self._has_shares = model.exchange is not None
        self._block_table = block_table
        self._peers = peers
        self._world_size = world_size = peers.world_size
        dtypes = [model.dtype, *([getattr(torch, config.merge_dtype)] if world_size > 1 else [])]
        coarsest = str(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
        self._dtype = coarsest if config.kv_dtype == "auto" else config.kv_dtype
        self._reference_dtype = "bfloat16" if self._dtype == "int8" else self._dtype
        """Plain attention does not round keys to 8 bits; the effect is comparable to that of bfloat16 weights."""
        self._is_coarse = torch.finfo(getattr(torch, self._reference_dtype)).eps > torch.finfo(torch.float32).eps
        self._answers: dict[int, ComparisonResult] = {}

    def is_tracking(self, rows: Iterable[Row]) -> bool:
        """Whether the logits of any of the rows are kept, or compared."""
        return any(
            row.is_compared or row.sequence in self._answers or (row.terms is not None and row.terms.reference_ids)
            for row in rows
        )

    def record_logits(self, rows: Sequence[Row], tokens: Sequence[Sequence[Token]], logits_NV: Tensor) -> None:
        """Keeps the logits from which the tokens of a step were chosen, for rows that are compared later. The logits of
        a row are followed by those of its drafts, including refused ones.
        """
        for row, first, chosen in zip(rows, first_positions(rows), tokens, strict=True):
            if not chosen:
                continue
            if row.terms is not None and row.terms.reference_ids:
                self._answers[row.sequence] = ComparisonResult(row.terms.reference_ids)
            if (answer := self._answers.get(row.sequence)) is not None:
                answer.add(row, [token.id for token in chosen], logits_NV[first : first + len(chosen)])

    def compare(self, rows: Sequence[Row], tokens: Sequence[Sequence[Token]]) -> dict[int, Verification]:
        """Compares answers that rows completed with their tokens, by sequence. A failure of plain attention is
        reported, not raised. With sharded weights, the other ranks call `assist` at the same time.
        """
        found = dict[int, Verification]()
        for row, chosen in zip(rows, tokens, strict=True):
            if not row.is_compared:
                continue
            is_complete = len(chosen) > len(row.draft_ids)
            answer = self._answers.pop(row.sequence) if is_complete else None
            if self._has_shares:
                self._share_answer(answer)
            if answer is not None:
                found[row.sequence] = self._compare(row, answer)
        return found

    def assist(self, rows: Sequence[Row]) -> None:
        """Takes part in the plain attention of rank 0 with the weights of this rank, if they are sharded."""
        if not self._has_shares:
            return
        for row in rows:
            if row.is_compared and (answer := self._share_answer(None)) is not None:
                with suppress(Exception):  # as on rank 0, which reports it
                    self._exact_and_plain(answer.token_ids, len(answer.logits), row.rope)

    def _share_answer(self, answer: ComparisonResult | None) -> ComparisonResult | None:
        """The answer of rank 0, whose logits other ranks do not have, only their number; None if rank 0 has none."""
        device = self._peers.device
        sizes = [len(answer.token_ids), len(answer.logits)] if answer is not None else [0, 0]
        num_ids, num_logits = self._peers.broadcast(torch.tensor(sizes, device=device)).tolist()
        if not num_ids:
            return None
        ids_T = torch.tensor(answer.token_ids if answer is not None else [0] * num_ids, device=device)
        shared = ComparisonResult(self._peers.broadcast(ids_T).tolist())
        shared.logits += [torch.empty(0)] * num_logits
        return shared

    def _compare(self, row: Row, answer: ComparisonResult) -> Verification:
        began = time.monotonic()
        try:
            exact_NV, plain_NV = self._exact_and_plain(answer.token_ids, len(answer.logits), row.rope)
        except Exception as error:  # a family without eager attention, or no memory for its scores
            return Verification(failure=f"plain attention failed: {type(error).__name__}: {error}")
        found_NV = torch.stack(answer.logits)
        difference_N = (found_NV - exact_NV).abs().amax(dim=-1)
        return Verification(
            max_difference=float(difference_N.max()),
            max_logit=float(exact_NV.abs().max()),
            distance=distance(found_NV, exact_NV),
            reference_distance=distance(plain_NV, exact_NV),
            reference_dtype=self._reference_dtype,
            worst_index=answer.first_index + int(difference_N.argmax()),
            compared_tokens=len(answer.logits),
            equal_tokens=int((found_NV.argmax(dim=-1) == exact_NV.argmax(dim=-1)).sum()),
            holding_ranks=sum(self._holds(rank, row) for rank in range(self._world_size)),
            dtype=self._dtype,
            reference_seconds=time.monotonic() - began,
        )

    def _exact_and_plain(self, token_ids: Sequence[int], num_last: int, rope: Rope) -> tuple[Tensor, Tensor]:
        """Logits [num_last, V] of plain attention, in float32 and in the coarse type of the ranks."""

        def computed_in(dtype: str) -> Tensor:
            with computing_in(self._model.module, getattr(torch, dtype)):
                return plain_logits(self._model, token_ids[:-1], num_last, rope)

        exact_NV = computed_in("float32")
        return exact_NV, computed_in(self._reference_dtype) if self._is_coarse else exact_NV

    def _holds(self, rank: int, row: Row) -> bool:
        """Whether a rank has keys that the row saw."""
        return any(True for _ in self._block_table.extents(row.path, 0, row.start + row.num_tokens, rank))

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops the kept logits of sequences that have ended or start again."""
        for sequence in sequences:
            self._answers.pop(sequence, None)


def distance(found_NV: Tensor, exact_NV: Tensor) -> float:
    """The relative distance of logits: the norm of the difference divided by the spread of the exact ones, as the
    median over N tokens; NaN if one is.
    """
    spread_N = (exact_NV - exact_NV.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((found_NV - exact_NV).norm(dim=-1) / spread_N).median())


def plain_logits(model: Model, token_ids: Sequence[int], num_last: int, rope: Rope) -> Tensor:
    """Logits [num_last, V], float32, after each of the last tokens, from transformers' own attention. Models with
    recurrent states compute the tokens after the first logits one by one, as `generate` does: some (Nemotron-H) use
    another formula for one row than for several.
    """
    ids = torch.tensor([token_ids], dtype=torch.long, device=model.device)
    model.ropes.rows = {rope: None}
    if model.exchange is not None:
        model.exchange.set_rows(own=False)
    with plain_attention(model.module):
        if model.mixers is not None:
            return torch.cat([*_logits_by_steps(model.module, ids, num_last)])
        logits_1TV = model.module(input_ids=ids, use_cache=False, logits_to_keep=num_last).logits
    return logits_1TV[0, -num_last:].float()


def _logits_by_steps(module: PreTrainedModel, ids_1T: Tensor, num_last: int) -> Iterator[Tensor]:
    """The logits [1, V], float32, after each of the last tokens, of which all but the first are computed one by one."""
    cache, positions_1T = None, torch.arange(ids_1T.shape[1], device=ids_1T.device)[None]
    sizes = [ids_1T.shape[1] - num_last + 1, *[1] * (num_last - 1)]
    for part, positions in zip(ids_1T.split(sizes, dim=1), positions_1T.split(sizes, dim=1), strict=True):
        found = module(input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        yield found.logits[0, -1:].float()


@contextmanager
def plain_attention(module: PreTrainedModel) -> Generator[None, None, None]:
    """Switches the model to its own attention in the body. A model that cannot switch stays on the hook, which raises:
    the sharded path is never compared with itself.
    """
    module.set_attn_implementation(PLAIN)
    try:
        yield
    finally:
        module.set_attn_implementation(hook.NAME)


@contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype) -> Generator[None, None, None]:
    """Makes a module compute in `dtype` in the body. The weights of a submodule are converted only while it runs, so
    that at most one submodule has two copies. A mixer is converted as a whole: it uses the weights of its convolution
    without running it.
    """
    handles: list[RemovableHandle] = []
    mixers = [part for part in module.modules() if isinstance(part, SequenceMixer)]
    inside = {part for mixer in mixers for part in mixer.modules()}
    for part in module.modules():
        if part not in inside or part in mixers:
            owners = part.modules() if part in mixers else (part,)
            own = [
                (owner, name, p)
                for owner in owners
                for name, p in owner.named_parameters(recurse=False)
                if p.dtype in WEIGHTS and p.dtype != dtype
            ]
            handles += _convert_while_running(part, own, dtype) if own else ()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _convert_while_running(
    part: nn.Module, own: Sequence[tuple[nn.Module, str, nn.Parameter]], dtype: torch.dtype
) -> list[RemovableHandle]:
    """Converts parameters, each of which a module has under a name, while `part` runs."""

    def convert(*_: object) -> None:
        for owner, name, weight in own:
            setattr(owner, name, nn.Parameter(weight.to(dtype), requires_grad=False))

    def restore(*_: object) -> None:
        for owner, name, weight in own:
            setattr(owner, name, weight)

    return [part.register_forward_pre_hook(convert), part.register_forward_hook(restore, always_call=True)]
