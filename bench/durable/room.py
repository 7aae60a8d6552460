"""Room for keys and values, so that a service has just as much as a measurement wants."""

import json
import math
from pathlib import Path

BLOCKS_MORE = 16
"""Extra blocks per rank for questions, answers, and blocks that a run does not fill."""
BLOCK = 128
FLOAT32 = 4


def token_bytes(model: Path) -> int:
    """Bytes of a token's keys and values in all layers, in float32."""
    config = json.loads((model / "config.json").read_text())
    return config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * FLOAT32


def kv_bytes(model: Path, num_tokens: int, world_size: int) -> int:
    """Bytes per rank with which all ranks together hold `num_tokens`."""
    return (math.ceil(num_tokens / world_size) + BLOCKS_MORE * BLOCK) * token_bytes(model)
