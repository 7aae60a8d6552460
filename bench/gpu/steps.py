"""Decode steps of a rank over stored keys: device time and host time per token."""

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.gpu import plans
from bench.gpu.cases import BLOCK_SIZE, STEP_TARGET, Step
from bench.gpu.counting import Counts, counted
from bench.gpu.ground import LeftOut
from bench.gpu.plain import Plain
from bench.gpu.ranks import LLAMA_8B, NotedGraphs, Shape, make_module, make_rank, noted, served
from longleaf.config import EngineConfig, GraphsChoice
from longleaf.rank_protocol.group_messages import Join
from longleaf.rank_protocol.step import StepPlan, StepResult
from workers.kv_cache.slots import FloatKvPool
from workers.model.model import Model
from workers.rank import Rank

WARM_UP, STEPS = 5, 30
MAX_STEPS = 2 * (WARM_UP + STEPS)
ROOM = 4 << 30
"""Bytes that a step needs beside weights and keys, at the upper end."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of a step, and the host's operations in one."""

    kernels: str
    token_ms: float
    """From one step's tokens to the next one's, where a step is begun before the tokens of the last have come."""
    host_ms: float
    """For which the host is busy to begin one."""
    counts: Counts | None
    why_eager: str
    """Empty where the step was captured."""


class Steps:
    """Measures decode steps of a random model of a shape."""

    def __init__(self, device: str, shape: Shape = LLAMA_8B, dtype: str = "bfloat16") -> None:
        self._device = device
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, dtype)

    def measure(self, case: Step, bandwidth: float) -> Row:
        """The row of a case: eager, captured, and as transformers does it. Raises LeftOut where it does not fit."""
        free(self._device)
        self._check_room(case)
        module = make_module(self._shape, self._dtype, self._device)
        module.lm_head.weight[plans.REFUSED] = 0.0  # so that drafts are refused over any keys
        plain: Row = {"reason": "measured with one row only"}
        if case.num_rows == 1 and not case.num_drafts:
            plain = Plain(module, self._device).measure(case.num_keys, WARM_UP, STEPS)
        embeddings = module.get_input_embeddings().parameters()  # of which a step reads a row
        weights = num_bytes(module.parameters()) - num_bytes(embeddings)
        keys = case.num_contexts * case.num_keys * self._bytes_per_token
        model = served(module, self._device)
        eager, captured = self._timed(model, case, "off"), self._timed(model, case, "auto")
        return {
            "kernels": captured.kernels,
            "is_captured": captured.why_eager == "",
            "why_eager": captured.why_eager,
            "eager_ms": round(eager.token_ms, 3),
            "captured_ms": round(captured.token_ms, 3),
            "eager_host_ms": round(eager.host_ms, 3),
            "captured_host_ms": round(captured.host_ms, 3),
            "eager_counts": eager.counts and eager.counts._asdict(),
            "captured_counts": captured.counts and captured.counts._asdict(),
            "weight_bytes": weights,
            "key_bytes": keys,
            "share": round((weights + keys) / bandwidth / captured.token_ms * 1e3, 4),
            "target": STEP_TARGET,
            "transformers": plain,
        }

    @property
    def _bytes_per_token(self) -> int:
        return self._shape.num_stored * self._dtype.itemsize

    def _check_room(self, case: Step) -> None:
        """Raises LeftOut where weights and keys are more than the device has free."""
        if not self._device.startswith("cuda"):
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        needed = self._kv_bytes(case) + self._shape.num_weights * self._dtype.itemsize + ROOM
        if needed > free:
            raise LeftOut(f"needs {needed / 2**30:.0f} GiB of free memory, and {free / 2**30:.0f} are there")

    def _kv_bytes(self, case: Step) -> int:
        blocks = plans.num_blocks(case.num_keys, case.num_contexts, case.num_rows, MAX_STEPS, BLOCK_SIZE)
        return blocks * BLOCK_SIZE * self._bytes_per_token

    def _timed(self, model: Model, case: Step, graphs: GraphsChoice) -> Timed:
        config = EngineConfig(
            model="random",
            block_size=BLOCK_SIZE,
            kv_bytes=self._kv_bytes(case),
            max_sequences=case.num_rows * (1 + case.num_drafts),
            max_draft_tokens=case.num_drafts,
            device="cuda" if self._device.startswith("cuda") else "cpu",
            cuda_graphs=graphs,
        )
        rank = make_rank(config)
        rank.allocate_pool(model)
        found = noted(rank)
        rank.join(Join(plans.EPOCH, 0, "", 0, ("here",)))
        fill(rank)
        work = plans.over_keys(case.num_keys, case.num_contexts, case.num_rows, BLOCK_SIZE, case.num_drafts)
        pairs, counts = times(rank, work, case.num_rows)
        kernels = rank.backend.name
        rank.close()
        del rank
        free(self._device)
        token, host = (median(seconds) * 1e3 for seconds in zip(*pairs, strict=True))
        return Timed(kernels, token, host, counts, why_eager(found))


def why_eager(graphs: NotedGraphs | None) -> str:
    """Why steps that were measured were not captured; empty where they were."""
    if graphs is None:
        return "there are no graphs here"
    fits = graphs.num_replayed >= STEPS
    return graphs.refusal or ("" if fits else "these steps do not fit into those that were captured")


def num_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def fill(rank: Rank) -> None:
    """Draws all keys and values that a rank has room for."""
    assert isinstance(rank.pool, FloatKvPool)
    for numbers_KSD in (*rank.pool.keys.values(), *rank.pool.values.values()):
        numbers_KSD.normal_()


def times(rank: Rank, work: Iterator[StepPlan], num_rows: int) -> tuple[list[tuple[float, float]], Counts | None]:
    """The times that `steady` measures after the first steps, and the counts of a single step."""
    rank.execute(next(work))
    steady(rank, work, num_rows, WARM_UP)
    pairs = steady(rank, work, num_rows, STEPS)
    plan = next(work)
    return pairs, counted(lambda: whole(rank.execute(plan), num_rows))


def steady(rank: Rank, work: Iterator[StepPlan], num_rows: int, num_steps: int) -> list[tuple[float, float]]:
    """Seconds from tokens to tokens, and those for which the host was busy to begin a step."""
    pending, found = rank.start(next(work)), list[tuple[float, float]]()
    last = time.perf_counter()
    for _ in range(num_steps):
        begin = time.perf_counter()
        following = rank.start(next(work))
        begun = time.perf_counter()
        whole(pending.result(), num_rows)
        now = time.perf_counter()
        found.append((now - last, begun - begin))
        pending, last = following, now
    whole(pending.result(), num_rows)
    return found


def whole(result: StepResult | None, num_rows: int) -> None:
    """Raises RuntimeError if a row has no token or drafts were accepted, because the measurement would be invalid."""
    if result is None or [len(tokens) for tokens in result.tokens.values()] != [1] * num_rows:
        raise RuntimeError(f"a step of {num_rows} rows gave {result}")


def free(device: str) -> None:
    """Releases unused memory."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
