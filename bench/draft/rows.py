"""How much longer a step takes whose sequence has more rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.draft.plans import SEQUENCE, Plans, num_blocks
from bench.gpu.ranks import make_rank
from bench.harness import ranks
from bench.harness.hosts import OWN
from bench.harness.subjects import Subject
from bench.harness.timing import slowest
from longleaf.config import EngineConfig, KvDtypeName
from workers.rank import Rank

COUNTS = (1, 2, 4, 8, 16)
"""Rows of the sequence in a step."""
KV_DTYPES: tuple[KvDtypeName, ...] = ("auto", "int8")
WARM_UP = 2
BLOCK_SIZE = 128
CHUNK = 4096
"""Keys that are drawn; all blocks get the same ones in turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: steps of each number of rows over the same keys."""

    context_tokens: int
    kv_dtype: KvDtypeName
    world_size: int


def measure(subject: Subject, case: Case, repeats: int) -> list[dict[str, object]]:
    """A row for each number of rows."""
    placement = ranks.Placement(case.world_size, 1, OWN)
    found = ranks.run(on_rank, placement, str(subject.folder), case, repeats)
    return rows_of(subject.name, case, slowest(found))


def rows_of(model: str, case: Case, seconds: dict[int, list[float]]) -> list[dict[str, object]]:
    """Rows from the seconds of the turns, by number of rows. `spread` adds ratios of successive turns."""
    ones = seconds[1]
    return [
        {
            "model": model,
            "context_tokens": case.context_tokens,
            "kv_dtype": "float32" if case.kv_dtype == "auto" else case.kv_dtype,
            "world_size": case.world_size,
            "rows": count,
            "step_ms": round(median(turns) * 1e3, 3),
            "ratio": round(median(turns) / median(ones), 3),
            **spread(turns, ones),
            "repeats": len(turns),
        }
        for count, turns in sorted(seconds.items())
    ]


def spread(turns: Sequence[float], ones: Sequence[float]) -> dict[str, float]:
    each = [many / one for many, one in zip(turns, ones, strict=True)]
    return {"ratio_min": round(min(each), 3), "ratio_max": round(max(each), 3)}


def on_rank(here: ranks.Rank, folder: str, case: Case, repeats: int) -> dict[int, list[float]]:
    """Seconds of the turns on this rank, by number of rows."""
    added = sum(COUNTS) * (WARM_UP + repeats)
    blocks = num_blocks(case.context_tokens, added, case.world_size, BLOCK_SIZE)
    config = EngineConfig(
        model=folder,
        world_size=case.world_size,
        block_size=BLOCK_SIZE,
        kv_bytes=blocks * BLOCK_SIZE * bytes_per_token(folder),
        kv_dtype=case.kv_dtype,
        device="cpu",
    )
    rank = make_rank(config, here.rank)
    rank.load()
    rank.connect(here.groups["shared_memory"] if case.world_size > 1 else None)
    fill(rank)
    plans = Plans(case.context_tokens, case.world_size, BLOCK_SIZE)
    rank.execute(plans.layout_plan())
    calls = {count: partial(step, rank, plans, count) for count in COUNTS}
    return here.take_turns(calls, repeats=repeats, warm_up=WARM_UP)


def step(rank: Rank, plans: Plans, num_rows: int) -> None:
    """Raises RuntimeError if rank 0 has no token at the end, because the measurement is then invalid."""
    result = rank.execute(plans.next(num_rows))
    if result is not None and SEQUENCE not in result.tokens:
        raise RuntimeError(f"a step of {num_rows} rows gave {result}")


def bytes_per_token(folder: str) -> int:
    """Of keys and values in float32, over all layers."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * dim)


def fill(rank: Rank) -> None:
    """Draws keys and values for all that a rank has room for."""
    generator = torch.Generator().manual_seed(rank.config.world_size)
    for layer, spec in rank.model.layers.items():
        k_KTD, v_KTD = torch.randn(2, spec.num_kv_heads, CHUNK, spec.head_dim, generator=generator)
        num_slots = rank.pool.num_blocks * BLOCK_SIZE
        for start in range(0, num_slots, CHUNK):
            slots_T = torch.arange(start, min(start + CHUNK, num_slots))
            count = len(slots_T)
            rank.pool.store(rank.backend, layer, slots_T, k_KTD[:, :count], v_KTD[:, :count])
