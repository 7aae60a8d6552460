"""Sharded weights on the GPUs of a machine: correctness against one GPU, the exchanges of a layer, and the decode steps
and chunks of large models, beside the latencies of `bench.predict` on H100 with NVLink.

    python3 -m bench.gpu.weights --json > weights.json    one rank on each GPU
    python3 -m bench.gpu.weights --dry-run                cases and predictions for --ranks, on any machine
    python3 -m bench.gpu.weights --device cpu --tiny      small models on CPUs, to try the command

On one GPU two ranks share it over gloo: correctness, and the memory of their shares. Large models have random weights,
and their layers share the same tensors, so that they fit. Steps are timed from plan to tokens, without overlap.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.gpu import ground
from bench.gpu.cases import Share

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from bench.predict.formulas import Cluster
    from workers.model.meta_model import Outline
    from workers.model.model import Model
    from workers.model.weight_parts import WeightPlan
    from workers.rank import Rank

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "phi3")
BLOCK_SIZE = 32
KV_BYTES = 64 << 20
CHUNK, NEW_TOKENS, ROWS = 4096, 40, (1, 8)
TINY_CHUNK, TINY_NEW_TOKENS = 128, 6
REPEATS = 20
Row = dict[str, Any]


class Place(NamedTuple):
    """Where ranks run."""

    num_ranks: int
    device: str
    """cpu, or cuda."""
    is_shared: bool
    """Whether the ranks share one GPU."""
    is_tiny: bool


class Large(NamedTuple):
    """A large model."""

    name: str
    kind: str
    """The model type of transformers."""
    sizes: dict[str, int]
    tiny_sizes: dict[str, int]


TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "vocab_size": 512,
}
LLAMA = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256}
LARGE = (
    Large(
        "70B, shape of Llama-3.1-70B",
        "llama",
        {
            **LLAMA,
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "intermediate_size": 28_672,
        },
        TINY,
    ),
    Large(
        "120B of experts, shape of GPT-OSS-120B",
        "gpt_oss",
        {
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "vocab_size": 201_088,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
)
SMALL = Large(
    "8B, shape of Llama-3.1-8B",
    "llama",
    {**LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 14_336},
    TINY,
)
"""The model whose shares are measured where ranks share a GPU."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print cases and predictions, and measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: that of the GPUs, at least 2)")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.dry_run and options.device == "cuda" and (status := ground.stand()) is not None:
        return status
    place = place_of(options)
    rows = list[Row]()
    for name, measure in cases(place, is_dry=options.dry_run):
        if options.only not in name:
            continue
        row: Row = {"case": name, "ranks": place.num_ranks, "device": place.device}
        try:
            row |= measure()
        except Exception as error:  # the other cases are measured
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        print(format_row(row), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps({"bench": "gpu_weights", "machine": machine_of(place), "rows": rows}, indent=1))
    return int(any("failed" in row or row.get("is_equal") is False for row in rows))


def place_of(options: argparse.Namespace) -> Place:
    """The ranks that the options ask for."""
    import torch

    num_gpus = torch.cuda.device_count() if options.device == "cuda" and not options.dry_run else 0
    usual = 8 if options.dry_run else max(2, num_gpus)
    return Place(options.ranks or usual, options.device, num_gpus == 1, options.tiny)


def machine_of(place: Place) -> object:
    if place.device == "cpu":
        return "cpu"
    from bench.gpu.machine import describe

    return describe(ground.DEVICE) if ground.has_gpu() else "none"


def format_row(row: Row) -> str:
    """One line for people."""
    return f"{row['case']}: " + ", ".join(f"{name} {value}" for name, value in row.items() if name != "case")


def cases(place: Place, *, is_dry: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The names of all cases, and the functions that measure them."""
    for family in FAMILIES:
        yield f"equal tokens, {family}", dict if is_dry else partial(measure_equality, family, place)
    if place.is_shared or place.device == "cpu":
        yield (
            f"memory of shares, {SMALL.name}",
            partial(predict_memory if is_dry else measure_memory, SMALL, place),
        )
    if place.is_shared:
        return
    for large in LARGE:
        yield large.name, partial(predict if is_dry else measure_large, large, place)


# --- correctness ---


def measure_equality(family: Any, place: Place) -> Row:
    """Whether ranks with sharded weights generate the tokens of one rank with whole weights, in float32. Logits are
    compared with plain attention when the ranks start.
    """
    from bench.gpu import plans, sharing
    from zoo.checkpoints import make_checkpoint

    case = Share(place.num_ranks, 4, 200, 24)
    found = list[sharing.Answered]()
    transports = list[str]()
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        make_checkpoint(Path(folder), family)
        for num_ranks in (place.num_ranks, 1):
            with sharing.processes(num_ranks, serve_checkpoint, place, folder) as ranks:
                ranks.join()
                work = plans.answers(sharing.prompts_of(case, 512), num_ranks, BLOCK_SIZE)
                found.append(sharing.collected(ranks, work))
                transports.append(ranks.readies[0].transport)
    return {"is_equal": found[0].tokens == found[1].tokens, "transport": transports[0]}


def serve_checkpoint(end: Connection, number: int, num_ranks: int, place: Place, folder: str) -> None:
    """Executes plans with a share of a checkpoint."""
    from bench.gpu.sharing import execute_plans
    from longleaf.shares import even_share

    rank = make_rank(place, num_ranks, number, folder, "float32", KV_BYTES)
    try:
        join(end, rank, number, num_ranks, lambda: rank.load(even_share(number, num_ranks)))
        execute_plans(end, rank, number)
    finally:
        rank.close()


def make_rank(place: Place, num_ranks: int, number: int, folder: str, dtype: Any, kv_bytes: int) -> "Rank":
    from bench.gpu import ranks
    from longleaf.config import EngineConfig

    config = EngineConfig(
        model=folder,
        world_size=num_ranks,
        weights="sharded",
        dtype=dtype,
        block_size=BLOCK_SIZE,
        kv_bytes=kv_bytes,
        max_sequences=max(ROWS),
        max_draft_tokens=0,
        device="cuda" if place.device == "cuda" else "cpu",
        verify_model=dtype == "float32",  # random weights are measured in bfloat16
    )
    return ranks.make_rank(config, number, 0 if place.is_shared else number)


def join(end: Connection, rank: "Rank", number: int, num_ranks: int, load: Callable[[], object]) -> None:
    """Loads the model, joins the other ranks, and sends the Ready message of the rank."""
    from bench.gpu.plans import EPOCH
    from longleaf.rank_protocol.group_messages import Join

    end.send(0 if number else rank.open_store())
    port = end.recv()
    load()
    end.send(rank.join(Join(EPOCH, number, "127.0.0.1", port, ("here",) * num_ranks)))


# --- large models ---


def write_config(large: Large, place: Place, folder: Path) -> None:
    """The config.json of a large model."""
    from transformers import AutoConfig

    sizes = large.tiny_sizes if place.is_tiny else large.sizes
    config = AutoConfig.for_model(large.kind, **sizes, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = [{"llama": "LlamaForCausalLM", "gpt_oss": "GptOssForCausalLM"}[large.kind]]
    config.save_pretrained(folder)


class Known(NamedTuple):
    """A large model without its weights."""

    config: "PreTrainedConfig"
    outline: "Outline"
    plan: "WeightPlan"


def known_of(folder: str, num_ranks: int) -> Known:
    from workers.model.meta_model import outline
    from workers.model.model import read_config
    from workers.model.weight_parts import plan_weights

    known = outline(folder, "bfloat16")
    return Known(read_config(folder), known, plan_weights(known, num_ranks))


def random_share(known: Known, number: int, num_ranks: int, device: str, *, is_shared: bool) -> "Model":
    """A model with random weights of a share. `is_shared`: layers use the same tensors."""
    import re
    from zlib import crc32

    import torch

    from workers.model.meta_model import build
    from workers.model.model import build_on_meta
    from workers.model.sharded_model import assemble
    from workers.model.weight_shares import Share as WeightShare

    share, cuts = WeightShare.even(number, num_ranks), known.plan.cuts
    module: Any = build(known.config, "bfloat16")
    plain: Any = build_on_meta(known.config, "bfloat16")
    module.set_experts_implementation(plain.config._experts_implementation)
    made = dict[str, torch.nn.Parameter]()
    for name, parameter in list(module.named_parameters()):
        key = re.sub(r"\d+", "*", name) if is_shared else name
        if key not in made:
            shape = cuts[name].shape(tuple(parameter.shape), share) if name in cuts else tuple(parameter.shape)
            generator = torch.Generator(device).manual_seed(crc32(key.encode()))  # equal routers on all ranks
            values = torch.empty(shape, dtype=parameter.dtype, device=device).normal_(0.0, 0.02, generator=generator)
            made[key] = torch.nn.Parameter(values, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, made[key])
    return assemble(module, known.outline, known.plan, device, share)[0]


def measure_large(large: Large, place: Place) -> Row:
    """The exchanges of a layer, decode steps and chunks, and their predictions."""
    from bench.gpu import sharing

    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        write_config(large, place, Path(folder))
        with sharing.processes(place.num_ranks, serve_random, place, folder) as ranks:
            ranks.join()
            row = ranks.receive()
    return {"transport": ranks.readies[0].transport, **row, **predict(large, place)}


def serve_random(end: Connection, number: int, num_ranks: int, place: Place, folder: str) -> None:
    """Measures a share of a large model with all other ranks; the first one sends the figures."""
    import torch

    from bench.gpu import plans
    from bench.gpu.ranks import NotedGraphs, noted
    from workers.kv_cache.pools import kv_bytes_per_token

    known = known_of(folder, num_ranks)
    num_prompt, num_new = sizes_of(place)
    requested = [plans.Asked(tuple(3 + j % 500 for j in range(num_prompt)), num_new) for _ in range(max(ROWS))]
    num_slots = len(requested) * plans.blocks_each(requested, BLOCK_SIZE) * BLOCK_SIZE
    per_token = sum(spec.num_stored for spec in known.outline.model.layers.values()) * 2
    rank = make_rank(place, num_ranks, number, folder, "bfloat16", num_slots * per_token)

    graphs = list[NotedGraphs | None]()

    def load() -> None:
        if rank.device != "cpu":
            torch.cuda.set_device(rank.device)
        rank.allocate_pool(random_share(known, number, num_ranks, rank.device, is_shared=True))
        graphs.append(noted(rank))

    try:
        assert kv_bytes_per_token(known.outline.model.layers, known.outline.model.dtype, rank.config) == per_token
        join(end, rank, number, num_ranks, load)
        row = time_exchanges(rank, known, num_ranks)
        for num_rows in ROWS:
            row |= time_steps(rank, requested[:num_rows], num_ranks)
        row["is_captured"] = graphs[0] is not None and graphs[0].num_replayed > 0
        if number == 0:
            end.send(row)
        end.recv()
    finally:
        rank.close()


def sizes_of(place: Place) -> tuple[int, int]:
    """Tokens of a prompt, and of an answer."""
    return (TINY_CHUNK, TINY_NEW_TOKENS) if place.is_tiny else (CHUNK, NEW_TOKENS)


def time_steps(rank: "Rank", requested: "Sequence[Any]", num_ranks: int) -> Row:
    """Milliseconds of a chunk, and of a decode step of as many rows as prompts."""
    from bench.gpu import plans
    from longleaf.rank_protocol.step import Prefill

    chunks, steps = list[float](), list[float]()
    for plan in plans.answers(requested, num_ranks, BLOCK_SIZE):
        began = time.perf_counter()
        rank.execute(plan)
        synchronize(rank.device)
        (chunks if isinstance(plan.work, Prefill) else steps).append(time.perf_counter() - began)
    rows = f"{len(requested)}_rows"
    return {f"chunk_ms_{rows}": milliseconds(min(chunks)), f"step_ms_{rows}": milliseconds(median(steps[2:]))}


def synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def time_exchanges(rank: "Rank", known: Known, num_ranks: int) -> Row:
    """Microseconds of each exchange of a decode layer, and all together, also in a graph."""
    import torch

    from bench.predict.formulas import Cluster
    from bench.predict.sharded_weights import exchanges_of
    from workers.cuda_graphs.graphs import CaptureRefused

    assert rank.epoch is not None and rank.epoch.peers.comm is not None
    comm = rank.epoch.peers.comm
    exchanges = exchanges_of(known.config, itemsize=2)
    row: Row = {}
    for num_rows in ROWS:
        operations = exchanges.decode_layer(exchanges.layers[-1], num_rows, Cluster(1, num_ranks))
        sent = [torch.zeros(int(one.num_bytes), dtype=torch.uint8, device=rank.device) for one in operations]

        def run_all(sent: "list[torch.Tensor]" = sent) -> None:
            for tensor in sent:
                comm.all_gather(tensor)

        name = f"exchanges_us_{num_rows}_rows"
        row[name] = [microseconds(partial(comm.all_gather, tensor), rank.device) for tensor in sent]
        row[f"{name}_together"] = microseconds(run_all, rank.device)
        row[f"{name}_bytes"] = [tensor.nbytes for tensor in sent]
        if rank.graphs is not None:
            try:
                row[f"{name}_captured"] = microseconds(rank.graphs.capture(run_all), rank.device)
            except CaptureRefused as error:
                row[f"{name}_captured"] = str(error)
    return row


def microseconds(call: Callable[[], object], device: str) -> float:
    """Median of a call that all ranks make equally often."""
    from bench.gpu import timing

    if device != "cpu":
        return round(1e6 * timing.seconds(call), 2)
    times = list[float]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(1e6 * median(times), 2)


# --- predictions ---


def predict(large: Large, place: Place) -> Row:
    """The bytes on a rank, and latencies on H100 with NVLink."""
    from bench.predict.formulas import Cluster

    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        write_config(large, place, Path(folder))
        known = known_of(folder, place.num_ranks)
    num_prompt, _ = sizes_of(place)
    cluster = Cluster(1, place.num_ranks)
    row: Row = {"share_bytes": max(bytes_of_shares(known, place.num_ranks))}
    for num_rows in ROWS:
        row[f"predicted_step_ms_{num_rows}_rows"] = milliseconds(step_seconds(known, num_rows, num_prompt, cluster))
    return row | {"predicted_chunk_ms": milliseconds(chunk_seconds(known, num_prompt, cluster))}


def predict_memory(large: Large, place: Place) -> Row:
    """The bytes on the first rank."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        write_config(large, place, Path(folder))
        return {"share_bytes": bytes_of_shares(known_of(folder, place.num_ranks), place.num_ranks)[0]}


def bytes_of_shares(known: Known, num_ranks: int) -> list[int]:
    """Bytes of the weights on each rank."""
    from workers.model.weight_parts import share_bytes
    from workers.model.weight_shares import Share as WeightShare

    shares = [WeightShare.even(number, num_ranks) for number in range(num_ranks)]
    return [share_bytes(known.outline, known.plan, share) for share in shares]


def used_numbers(known: Known, num_rows: int) -> float:
    """Numbers of the weights that rows use: a row of the embedding, and at most its experts."""
    text: Any = known.config.get_text_config()
    num_experts, num_used = getattr(text, "num_local_experts", 0) or 0, getattr(text, "num_experts_per_tok", 0) or 0
    total = 0.0
    for name, parameter in known.outline.parameters.items():
        if name in {f"{embedding}.weight" for embedding in known.plan.embeddings}:
            continue
        is_expert = num_experts and parameter.dim() == 3
        total += parameter.numel() * (min(1.0, num_rows * num_used / num_experts) if is_expert else 1.0)
    return total


def step_seconds(known: Known, num_rows: int, num_keys: int, cluster: "Cluster") -> float:
    """A decode step: reads of weights and keys at the rate of the memory, and its exchanges."""
    from bench.predict.constants import published
    from bench.predict.formulas import Terms, total
    from bench.predict.libraries import nccl
    from bench.predict.sharded_weights import exchanges_of

    exchanges = exchanges_of(known.config, itemsize=2)
    keys = exchanges.attention.kv_bytes(num_rows * num_keys) * len(exchanges.layers)
    read = (2 * used_numbers(known, num_rows) + keys) / cluster.world_size
    operations = exchanges.decode(num_rows, cluster)
    return total(operations, cluster, nccl).plus(Terms(key_bytes=read)).seconds(published("solved"))


def chunk_seconds(known: Known, num_rows: int, cluster: "Cluster") -> float:
    """A chunk of a prompt: products of its rows with the weights, without those of attention, and its exchanges."""
    from bench.predict.constants import PRODUCTS, published
    from bench.predict.formulas import total
    from bench.predict.libraries import nccl
    from bench.predict.sharded_weights import exchanges_of

    operations = exchanges_of(known.config, itemsize=2).prefill(num_rows // cluster.world_size, cluster)
    products = 2 * used_numbers(known, 1) * num_rows / cluster.world_size / PRODUCTS.value
    return products + total(operations, cluster, nccl).seconds(published("solved"))


# --- memory ---


def measure_memory(large: Large, place: Place) -> Row:
    """Bytes of the weights of the first rank, which shares a device with the others."""
    from bench.gpu import sharing

    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        write_config(large, place, Path(folder))
        with sharing.processes(place.num_ranks, hold_share, place, folder) as ranks:
            found = ranks.receive()
    predicted = predict_memory(large, place)
    return {"held_bytes": found, **predicted, "is_equal": abs(found / predicted["share_bytes"] - 1) < 0.02}


def hold_share(end: Connection, number: int, num_ranks: int, place: Place, folder: str) -> None:
    """Allocates a share, and sends its bytes: on a GPU as torch counts them."""
    import torch

    device = ground.DEVICE if place.device == "cuda" else "cpu"
    model = random_share(known_of(folder, num_ranks), number, num_ranks, device, is_shared=False)
    num_bytes = sum(parameter.nbytes for parameter in model.module.parameters())
    end.send(torch.cuda.memory_allocated(device) if place.device == "cuda" else num_bytes)
    end.recv()


if __name__ == "__main__":
    sys.exit(main())
