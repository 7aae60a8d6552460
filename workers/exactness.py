"""Compares the served path of a checkpoint with plain attention before it serves.

Random tokens pass through an epoch of one rank: two chunks of prefill, a question of several rows, and decode steps,
over keys in a small pool. The logits are compared with those of transformers' own attention over the same weights, as
by `longleaf verify` (`workers.runners.verification`). If each rank holds a share of the weights, all ranks do so
together when they join their first epoch. Models of every class are compared: some models mix rows only with certain
configs or weights. If a dtype other than float32 does not pass, the comparison is repeated in float32.

A model that was found exact is recorded by its fingerprint, so a restart skips the comparison.
"""

import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from longleaf.comm import Groups
from longleaf.config import NOT_VERIFIED, EngineConfig
from longleaf.errors import ModelRefused
from longleaf.fingerprint import Fingerprint
from longleaf.formatting import human_rounded
from longleaf.kernels import registry
from longleaf.kernels.backend import Backend
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Decode, Prefill, Row, SamplingTerms, StepPlan, Work
from longleaf.rank_protocol.verdict import Verification, judge
from longleaf.runs import Run, ceil_div
from longleaf.sampling import SamplingParams
from longleaf.storage.store import Store as Storage
from workers.group_session import GroupSession, RankResources
from workers.kv_cache.pools import make_states
from workers.kv_cache.slots import FloatKvPool
from workers.kv_io.kv_io import KvIo
from workers.model.mixers import describe_layers
from workers.model.model import Model, describe_error, special_ids
from workers.runners.verification import computing_in
from workers.sampling.device_sampler import make_sampler
from workers.step.last_tokens import DeviceIds, HostIds

CHUNKS, QUESTION, ANSWER = (24, 17), 5, 6
"""Numbers of tokens: per chunk, in the question, and in the answer, whose logits are compared."""
NUM_TOKENS = sum(CHUNKS) + QUESTION + ANSWER
BLOCK_SIZE = 16
SEQUENCE = 0
EXACT = "exact"
"""The folder of the records within the cache folder."""
PACKAGES = ("longleaf", "torch", "transformers")
"""Packages whose versions are part of the key of a record."""
log = logging.getLogger("longleaf.exactness")  # the rank's messages, which the coordinator logs


class ExactnessRecords:
    """The models that were found exact, as empty files in `folder`. If the storage fails, no model is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def holds(self, key: str) -> bool:
        try:
            return (self._folder / key).is_file()
        except OSError:
            return False

    def add(self, key: str) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / key).touch(mode=0o600)
        except OSError as error:
            log.info("exactness: cannot record the result; the next start will verify the model again: %s", error)


def record_key(fingerprint: Fingerprint, model: Model, backend: Backend) -> str:
    """The key of everything that the comparison depends on, in hexadecimal."""
    versions = [version(package) for package in PACKAGES]
    if model.exchange is not None:
        versions.append(f"{model.exchange.share.count} shares")
    facts = (fingerprint.digest, str(model.dtype), torch.device(model.device).type, backend.name, *versions)
    return blake3(msgspec.msgpack.encode(facts)).hexdigest()


def verify_model(
    model: Model,
    backend: Backend,
    config: EngineConfig,
    fingerprint: Fingerprint | None,
    records: ExactnessRecords,
    groups: Groups | None = None,
) -> str:
    """Like `check_exact`, but skips models whose fingerprint is recorded, and records a model that agrees. With
    `groups`, rank 0 decides. The comparison does not cover single rows that follow another formula, so the reason of a
    model with such layers is never empty.
    """
    reason = describe_two_formulas(model)
    is_first = groups is None or groups.world.rank == 0
    key = record_key(fingerprint, model, backend) if fingerprint and is_first else ""
    if _of_first(groups, bool(key) and records.holds(key), model.device):
        return reason
    began = time.monotonic()
    note = check_exact(model, backend, config, groups)
    if is_first:
        log.info("exactness: %s", note or f"compared with plain attention in {time.monotonic() - began:.1f} s")
    if key and not note:
        records.add(key)
    if model.device != "cpu":
        torch.cuda.empty_cache()  # releases the memory of the comparison for keys and values
    return note or reason


def describe_two_formulas(model: Model) -> str:
    """The reason why answers of a model may differ from `generate` although the two agree on the compared tokens; empty
    if there is none."""
    layers = model.mixers.with_two_formulas if model.mixers is not None else []
    return f"{describe_layers(layers)}: transformers computes single rows by another formula" if layers else ""


def _of_first(groups: Groups | None, is_so: bool, device: str) -> bool:
    """The value of `is_so` on rank 0. A collective call."""
    return is_so if groups is None else bool(groups.world.broadcast(torch.tensor([int(is_so)], device=device)))


def check_exact(model: Model, backend: Backend, config: EngineConfig, groups: Groups | None = None) -> str:
    """Compares the served path of a model with plain attention. Returns an empty string if they agree, or the reason
    why the comparison was not possible. Raises ModelRefused if they differ. `groups`: the ranks of sharded weights,
    which compute together; rank 0 judges.
    """
    found = compare(model, backend, groups)
    if not _of_first(groups, judge(found).passed, model.device) and model.dtype != torch.float32:
        found = compare_in_float32(model, config, groups) or found
    if groups is not None and groups.world.rank:
        return ""
    verdict = judge(found)
    if verdict.passed:
        return ""
    if found.failure or not verdict.is_conclusive:
        return f"{NOT_VERIFIED}: {found.failure or f'in {found.dtype} rounding may hide a difference'}"
    raise ModelRefused(
        f"{type(model.module).__name__} is not exact here: its logits in {found.dtype} differ from "
        f"those of transformers by up to {human_rounded(found.max_difference, 2)}, the largest is "
        f"{human_rounded(found.max_logit, 2)}, and {found.equal_tokens} of {found.compared_tokens} tokens are the same"
    )


def compare_in_float32(model: Model, config: EngineConfig, groups: Groups | None = None) -> Verification | None:
    """The comparison with all weights converted to float32 on use; None where that is not possible."""
    try:
        backend = registry.choose(config.kernels, model.device, torch.float32)
        with computing_in(model.module, torch.float32):
            found = compare(replace(model, dtype=torch.float32), backend, groups)
    except Exception as error:  # layers may use weights of other layers, and kernels may support a single dtype
        log.info("exactness: not compared in float32: %s", describe_error(error))
        return None
    return None if found.failure else found


def compare(model: Model, backend: Backend, groups: Groups | None = None) -> Verification:
    """Compares the logits of the served path with those of plain attention, after each token of a short greedy answer.
    Only rank 0 has a result; the others return an empty one. Raises ModelRefused if the model cannot run such steps.
    """
    scale = min(1.0, (model.rotary.trained or NUM_TOKENS) / NUM_TOKENS)
    first, second, question, answer = (max(1, int(scale * size)) for size in (*CHUNKS, QUESTION, ANSWER))
    ids = random_ids(model, first + second + question)
    world_size = groups.world.world_size if groups is not None else 1
    epoch = GroupSession(make_resources(model, backend, world_size), groups)
    comparisons = {SEQUENCE: Verification()}
    try:
        has_states = model.mixers is not None
        for step, work in enumerate(make_works(ids, (first, second), answer, world_size, has_states=has_states)):
            result = epoch.start(StepPlan(0, step, work)).result()
            if result is None:
                continue
            if result.not_finite or not result.has_finite_keys:
                return Verification(failure="its keys or logits for random tokens are not finite")
            comparisons |= result.comparisons
    except Exception as error:
        raise ModelRefused(
            f"{type(model.module).__name__} cannot run on such steps: {describe_error(error)}"
        ) from error
    finally:
        epoch.close()
    return comparisons[SEQUENCE]


def random_ids(model: Model, count: int) -> list[int]:
    """Ids that are neither padding nor special; the same ones for the same model."""
    config = model.module.config
    special = special_ids(config) | special_ids(config.get_text_config())
    usable = [i for i in range(config.get_text_config().vocab_size) if i not in special]
    return random.Random(0).choices(usable, k=count)


def make_works(
    ids: Sequence[int], chunks: Sequence[int], num_answer: int, world_size: int = 1, *, has_states: bool = False
) -> Iterator[Work]:
    """Prefill in `chunks`, of which each rank has a piece, then decode: the rest of the ids as a question, and one step
    for each further token. With `has_states`, each step has a slot for the recurrent state at its end.
    """
    path, start, block, slot = (0,), 0, 0, 0
    for size in chunks:
        edges = [start + size * rank // world_size for rank in range(world_size + 1)]
        blocks = tuple(range(block, block + ceil_div(size, BLOCK_SIZE)))
        pieces = [
            Run(rank, edges[rank], edges[rank + 1], blocks[: ceil_div(edges[rank + 1] - edges[rank], BLOCK_SIZE)])
            for rank in range(world_size)
            if edges[rank] < edges[rank + 1]
        ]
        states = make_state_runs(start, start + size, slot) if has_states else ()
        yield Prefill(path, start, tuple(ids[start : start + size]), tuple(pieces), window_runs=states)
        start, block, slot = start + size, block + len(blocks), slot + 1
    terms = SamplingTerms(SamplingParams(max_tokens=num_answer, ignore_end_token=True), reference_ids=tuple(ids))
    for index in range(num_answer):
        end = len(ids) + index
        run = Run(0, start, end, tuple(range(block, block + ceil_div(end - start, BLOCK_SIZE))))
        num_reference = end if index == num_answer - 1 else 0
        low = start if index == 0 else end - 1
        states = make_state_runs(low, end, slot + index) if has_states else ()
        given, own_terms = (tuple(ids[start:]), terms) if index == 0 else ((), None)
        # all rows are complete: states of later rows are not given by the previous ones
        is_complete = index == 0 or has_states
        yield Decode(
            (
                Row(
                    SEQUENCE,
                    path if is_complete else (),
                    low,
                    given,
                    (run,),
                    index,
                    own_terms,
                    num_reference,
                    window_runs=states,
                ),
            )
        )


def make_state_runs(start: int, end: int, slot: int) -> tuple[Run, ...]:
    """The recurrent states before and after a step with positions [start, end), in the slots before and at `slot`."""
    before = (Run(EVERY_RANK, start - 1, start, (slot - 1,)),) if start else ()
    return (*before, Run(EVERY_RANK, end - 1, end, (slot,)))


def make_resources(model: Model, backend: Backend, world_size: int = 1) -> RankResources:
    """Resources with a pool of as many blocks as the comparison needs."""
    num_blocks = sum(ceil_div(size, BLOCK_SIZE) for size in (*CHUNKS, QUESTION + ANSWER))
    return RankResources(
        config=EngineConfig(
            model="",
            world_size=world_size,
            merge="gather",  # the fastest one is chosen later, for steps of the usual size
            block_size=BLOCK_SIZE,
            max_sequences=1,
            max_draft_tokens=0,
        ),
        device=model.device,
        model=model,
        pool=FloatKvPool(
            model.layers,
            num_blocks,
            BLOCK_SIZE,
            model.dtype,
            model.device,
            states=make_states(model, len(CHUNKS) + ANSWER),
        ),
        backend=backend,
        sampler=make_sampler(model.device, 1),
        last_ids=HostIds() if model.device == "cpu" else DeviceIds(1, model.device),
        kv_io=KvIo(0, None, Storage.open, model.device),
    )
