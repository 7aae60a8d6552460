"""Whether a class of causal language models is served exactly, refused, or nothing that transformers itself can ask."""

import asyncio
from pathlib import Path
from typing import Literal

import msgspec
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longleaf.config import EngineConfig
from longleaf.errors import LongleafError, ModelRefused
from longleaf.kernels import registry
from tests.support.golden.asking import answer
from tests.support.golden.plain import LOGIT_TOLERANCE, Golden, ask_plain, draw_ids, load_plain
from tests.support.golden.states import Logits, running
from tests.support.threads import config_for
from workers.exactness import check_exact
from workers.model import model
from zoo.classes import KINDS, NOT_ALONE, write_small

Result = Literal["exact", "refused", "cannot", "wrong", "fails"]
"""`cannot`: transformers itself makes no small model, or does not generate with it. `wrong` and `fails` are bugs."""
ALLOWED: tuple[Result, ...] = ("exact", "refused", "cannot")
NUM_PROMPT, NUM_NEW = 400, 8
CHANGED = slice(NUM_PROMPT - 60, NUM_PROMPT - 40)
"""Tokens of the prompt on which the answer must depend, within the windows of all classes."""
PATIENCE = 60
"""Seconds after which a service that does not answer has failed."""


class Finding(msgspec.Struct, frozen=True):
    """The result for one class."""

    model_type: str
    name: str
    """The name of the class."""
    result: Result
    reason: str = ""


async def walk(model_type: str, folder: Path) -> Finding:
    """Makes a small random checkpoint of a class in an empty folder, and asks transformers and a service of two
    ranks."""
    result, reason = await _try(model_type, folder)
    reason = reason.removeprefix(f"{folder} ").replace(str(folder), "the checkpoint")
    return Finding(model_type, class_name(model_type), result, reason)


def class_name(model_type: str) -> str:
    """Without importing the class, of which there are many."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


async def _try(model_type: str, folder: Path) -> tuple[Result, str]:
    try:
        write_small(KINDS[model_type], folder)
    except Exception as error:  # classes may raise anything for this config
        return _refused_by_config(folder) or ("cannot", NOT_ALONE.get(model_type, model.describe_error(error)))
    try:
        loaded = model.load(str(folder), "float32", "cpu")
    except ModelRefused as refused:
        return "refused", str(refused)
    try:
        golden, _ = ask_plain(folder, draw_ids(NUM_PROMPT), NUM_NEW)
        dependence = _dependence(golden)
    except Exception as error:  # it has a custom generate
        return "cannot", model.describe_error(error)
    try:
        note = check_exact(loaded, registry.choose("auto", "cpu", loaded.dtype), EngineConfig(model=""))
    except ModelRefused as refused:
        return "refused", str(refused)
    if note or dependence < 10 * LOGIT_TOLERANCE:
        return (
            "fails",
            note or f"other tokens change the logits by {dependence:.1e} of their deviation: nothing is proven",
        )
    return await _compare(golden)


def _refused_by_config(folder: Path) -> tuple[Result, str] | None:
    """The reason for a refusal that depends only on the config. The folder has no weights."""
    if not (folder / "config.json").is_file():
        return None
    try:
        model.read_config(str(folder))
    except ModelRefused as refused:
        return "refused", str(refused)
    return None


@torch.inference_mode()
def _dependence(golden: Golden) -> float:
    """How much the logits after the prompt change with tokens of it, in standard deviations of the logits."""
    ids = torch.tensor([golden.prompt])
    changed = ids.clone()
    changed[:, CHANGED] = ids[:, CHANGED].flip(1)
    plain = load_plain(golden.folder)
    found, other = (plain(these, use_cache=False).logits[0, -1] for these in (ids, changed))
    return float((found - other).abs().max() / found.std())


async def _compare(golden: Golden) -> tuple[Result, str]:
    """The tokens and logits of a service on two ranks, with chunks that are shorter than the prompt."""
    logits = Logits()
    config = config_for(golden.folder, world_size=2, chunk_size=64)
    try:
        async with asyncio.timeout(PATIENCE), running(config, logits.watch) as engine:
            tokens = await answer(engine, golden.prompt, num_new=NUM_NEW)
    except (TimeoutError, LongleafError) as error:
        return "fails", model.describe_error(error)
    pairs = zip(tokens, golden.tokens, strict=True)
    num_alike = next((i + 1 for i, (ours, theirs) in enumerate(pairs) if ours != theirs), NUM_NEW)
    difference = float((logits.first(num_alike) - golden.logits_TV[:num_alike]).abs().max() / golden.logits_TV.std())
    if tokens != golden.tokens or difference > LOGIT_TOLERANCE:
        return "wrong", f"logits differ by {difference:.1e} of their deviation after {num_alike} tokens"
    return "exact", ""
