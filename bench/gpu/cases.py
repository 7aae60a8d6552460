"""The cases of the GPU benchmark. This module does not need a GPU, torch or Triton."""

from collections.abc import Iterator
from typing import NamedTuple

KEY_HEADS, GROUP, DIM = 8, 4, 128
LATENT_GROUP, LATENT, VALUES = 16, 576, 512
BLOCK_SIZE = 128
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "latent": 2}
KEYS = (8192, 32768, 131072, 524288, 1048576)
TARGETS, TARGET_FROM = {"bfloat16": 0.85, "int8": 0.88, "float32": 0.70}, 131072
"""Share of a copy's bandwidth that is aimed at, by type of keys, over so many keys and more, of 8 key heads of 128."""
TARGET_TFLOPS, TARGET_TFLOPS_FROM_ROWS = 400.0, 64
"""Rate of the products of so many rows that share keys, of which the products take longer than the reads."""
PREFILL_TFLOPS, PREFILL_TFLOPS_FROM = 500.0, 32768
"""Rate that is aimed at for chunks after so many tokens."""
PASTS, CHUNK = (0, 32768, 131072), 4096
RAGGED = (100_000, 3000)
"""Keys and rows that are no powers of two."""
STEP_KEYS = (32768, 131072, 262144, 524288)
DRAFTS = 7
STEP_TARGET = 0.75
"""Share of a copy's bandwidth at which a decode step shall read weights and keys."""
SAMPLED_ROWS, VOCABULARY = 64, 152_000
KINDS = ("greedy", "temperature", "top-k and top-p", "all settings mixed", "20 logprobs")
"""How tokens are chosen."""


class Attend(NamedTuple):
    """Rows that attend to keys: to all of them together, or each to its own share of them."""

    keys: str
    """The dtype of stored keys and values; latents are bfloat16."""
    num_keys: int
    num_rows: int = 1
    is_shared: bool = True

    @property
    def name(self) -> str:
        return "attend"

    @property
    def num_bytes(self) -> int:
        """That are read at least."""
        if self.keys == "latent":
            return self.num_keys * LATENT * ITEMSIZE["latent"]
        extra = 4 + DIM / BLOCK_SIZE if self.keys == "int8" else 0  # scales of values, exponents of blocks
        return int(KEY_HEADS * self.num_keys * (2 * DIM * ITEMSIZE[self.keys] + extra))

    @property
    def num_flops(self) -> int:
        """FLOPs of the required products."""
        pairs = self.num_rows * self.num_keys if self.is_shared else self.num_keys
        if self.keys == "latent":
            return 2 * LATENT_GROUP * (LATENT + VALUES) * pairs
        return 4 * KEY_HEADS * GROUP * DIM * pairs

    @property
    def target(self) -> float | None:
        """The share that is aimed at; None: no such aim."""
        return TARGETS.get(self.keys) if self.num_keys >= TARGET_FROM else None

    @property
    def target_tflops(self) -> float | None:
        """The rate that is aimed at instead if its products take longer than the reads; None: the share is."""
        return TARGET_TFLOPS if self.target and self.num_rows >= TARGET_TFLOPS_FROM_ROWS and self.is_shared else None


class Move(NamedTuple):
    """A kernel that moves stored data: stores, packs or folds `num_rows` tokens."""

    name: str
    """store, store_int8, pack or fold."""
    num_rows: int
    num_partials: int = 1

    @property
    def num_bytes(self) -> int:
        """That are read and written at least."""
        if self.name.startswith("store"):
            written = KEY_HEADS * (2 * DIM + 4 if self.name == "store_int8" else 4 * DIM)
            return self.num_rows * (KEY_HEADS * 2 * DIM * ITEMSIZE["bfloat16"] + written)
        return self.num_rows * KEY_HEADS * GROUP * (DIM + 1) * ITEMSIZE["float32"] * (self.num_partials + 1)


class Prefill(NamedTuple):
    """A chunk that reads a past and itself, in one layer."""

    past: int
    num_rows: int = CHUNK

    @property
    def name(self) -> str:
        return "prefill"

    @property
    def target_tflops(self) -> float | None:
        """The rate that is aimed at; None: no such aim."""
        return PREFILL_TFLOPS if self.past >= PREFILL_TFLOPS_FROM else None

    @property
    def num_flops(self) -> int:
        """FLOPs of the required products: each token attends to the past and half of the chunk."""
        return int(4 * KEY_HEADS * GROUP * DIM * self.num_rows * (self.past + (self.num_rows + 1) / 2))


class Step(NamedTuple):
    """A decode step of a whole model: rows that share one context, or rows with separate contexts."""

    num_keys: int
    num_rows: int = 1
    is_shared: bool = True
    num_drafts: int = 0
    """Behind the token of each row, none of which is accepted."""

    @property
    def name(self) -> str:
        return "step"

    @property
    def num_contexts(self) -> int:
        return 1 if self.is_shared else self.num_rows


class Choose(NamedTuple):
    """The tokens of rows, chosen from their logits."""

    kind: str
    """One of KINDS."""
    num_rows: int = SAMPLED_ROWS
    vocabulary: int = VOCABULARY

    @property
    def name(self) -> str:
        return "choose"


class Share(NamedTuple):
    """Ranks that share the GPU, over gloo, and answer prompts of so many tokens."""

    num_ranks: int = 2
    num_rows: int = 8
    num_prompt: int = 1000
    num_tokens: int = 64
    """Tokens of each answer."""

    @property
    def name(self) -> str:
        return "share"


KernelCase = Attend | Move | Prefill
Case = KernelCase | Step | Choose | Share


def cases() -> Iterator[Case]:
    """All cases, the most important first: a run without enough time omits the last ones."""
    for num_keys in KEYS:
        yield Attend("bfloat16", num_keys)
    for num_keys in STEP_KEYS:
        yield Step(num_keys)
    yield Step(131072, 8)
    yield Step(32768, 8, is_shared=False)
    yield from (Step(num_keys, num_drafts=DRAFTS) for num_keys in (32768, 131072))
    yield Step(131072, 8, num_drafts=DRAFTS)
    yield from map(Choose, KINDS)
    yield Share()
    yield from map(Prefill, PASTS)
    yield Prefill(*RAGGED)
    for keys in ("int8", "latent", "float16", "float32"):
        for num_keys in KEYS:
            yield Attend(keys, num_keys)
    for num_rows in (8, 64):
        for is_shared in (True, False):
            for num_keys in (131072, 1048576):
                yield Attend("bfloat16", num_keys, num_rows, is_shared)
    for keys in ("int8", "latent"):
        for is_shared in (True, False):
            yield Attend(keys, 131072, 8, is_shared)
    yield Move("store", CHUNK)
    yield Move("store_int8", CHUNK)
    yield Move("pack", CHUNK)
    yield Move("fold", 64, 8)
    yield Move("fold", CHUNK, 8)


def label(case: Case) -> str:
    """A case in a line."""
    match case:
        case Attend():
            return f"attend, {rows_of(case)} over {case.num_keys} keys, {case.keys}"
        case Move():
            partials = f" from {case.num_partials}" if case.name == "fold" else ""
            return f"{case.name} of {case.num_rows} rows{partials}"
        case Prefill():
            return f"prefill of {case.num_rows} tokens after {case.past}"
        case Step():
            drafts = f" with {case.num_drafts} drafts" if case.num_drafts else ""
            return f"step, {rows_of(case)}{drafts} over {case.num_keys} keys"
        case Choose():
            return f"choose, {case.num_rows} rows of {case.vocabulary} logits, {case.kind}"
        case Share():
            return f"share, {case.num_ranks} ranks on one GPU over gloo, {case.num_rows} rows"


def rows_of(case: Attend | Step) -> str:
    """How many rows there are, and whether they see the same."""
    sharing = "" if case.num_rows == 1 else " that share" if case.is_shared else ", each its own,"
    return f"{case.num_rows} row{'s' * (case.num_rows > 1)}{sharing}"
