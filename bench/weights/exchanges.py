"""Exchanges of a decode step, as the preflight derives them. Tests compare them with those that ranks begin."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.durable.options import Row
from workers.model.meta_model import outline
from workers.model.weight_parts import plan_weights
from zoo.checkpoints import make_checkpoint
from zoo.families import FAMILIES


def measure() -> Row:
    """By family of models with 4 layers: exchanges with sharded weights, and with whole ones."""
    logging.disable(logging.WARNING)
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        return {family: of_family(make_checkpoint(Path(folder, family), family)) for family in FAMILIES}


def of_family(folder: Path) -> list[int]:
    known = outline(str(folder), "auto")
    whole = len(known.model.layers) + 1
    return [whole + plan_weights(known, 2).exchanges.total, whole]
