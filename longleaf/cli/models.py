"""`longleaf models`."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.table import Table

from longleaf.checkpoints.gguf_conversion import read_note
from longleaf.cli.console import output_console
from longleaf.cli.fetch import convert, fetch
from longleaf.cli.help import CommandGroup
from longleaf.cli.model_option import MODEL_HELP, Yes, resolve
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.config import (
    KV_DTYPE_HELP,
    WEIGHTS_DTYPE_HELP,
    DtypeName,
    EngineConfig,
    KvDtypeName,
    WeightsChoice,
    WeightsDtype,
)
from longleaf.errors import LongleafError, ModelRefused
from longleaf.extras import require_extra
from longleaf.fingerprint import Fingerprint, read_fingerprint
from longleaf.formatting import human_bytes
from longleaf.model_report import (
    AttentionKind,
    AttentionReport,
    CapacityPlan,
    Dequantized,
    ExchangeReport,
    GpuPlan,
    ModelReport,
    TextReport,
    describe_layouts,
)
from longleaf.runs import join
from longleaf.topology import count_ranks, describe_lost
from longleaf.types import Cluster

REFUSED = 2
"""Exit code for an unsupported checkpoint."""
Report = TypeVar("Report", TextReport, AttentionReport)
_DEFAULTS = EngineConfig(model="")

app = CommandGroup(help="Download or convert a checkpoint, and check whether it can be served.")


@app.callback()
def options() -> None:
    """Download or convert a checkpoint, and check whether it can be served."""


app.command("fetch")(fetch)
app.command("convert")(convert)


@app.command("check")
def check(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    world_size: Annotated[int, typer.Option("--world-size", "--ranks", help="Number of ranks to plan for.")] = 1,
    weights: Annotated[
        WeightsChoice,
        typer.Option(
            help="Plan for all weights on each rank, or for an equal part; auto: for those that `serve` chooses here."
        ),
    ] = _DEFAULTS.weights,
    weights_dtype: Annotated[WeightsDtype, typer.Option(help=WEIGHTS_DTYPE_HELP)] = _DEFAULTS.weights_dtype,
    spare_ranks: Annotated[
        int,
        typer.Option(help="With sharded weights: number of lost ranks for whose weights the others have room."),
    ] = _DEFAULTS.spare_ranks,
    kv_bytes: Annotated[
        int | None,
        typer.Option(
            help="Memory for keys and values per rank.",
            show_default="40 % of this machine's free memory beside the weights, divided among the ranks; on GPUs most",
            metavar="BYTES",
        ),
    ] = None,
    window_bytes: Annotated[
        int | None,
        typer.Option(
            help="Plan for --window-keys replicated: the part of --kv-bytes for sliding-window layers.",
            show_default="enough for --max-sequences, at most half",
            metavar="BYTES",
        ),
    ] = None,
    state_bytes: Annotated[
        int | None,
        typer.Option(
            help="For models with recurrent states: the part of --kv-bytes for them.",
            show_default="enough for --max-sequences, at most half",
            metavar="BYTES",
        ),
    ] = None,
    max_sequences: Annotated[
        int, typer.Option(help="Maximum number of concurrent generations.")
    ] = _DEFAULTS.max_sequences,
    block_size: Annotated[
        int, typer.Option(help="Tokens per block of the pool.", metavar="TOKENS")
    ] = _DEFAULTS.block_size,
    dtype: Annotated[
        DtypeName, typer.Option(help="Type of weights and activations; auto: that of the checkpoint.")
    ] = _DEFAULTS.dtype,
    kv_dtype: Annotated[KvDtypeName, typer.Option(help=KV_DTYPE_HELP)] = _DEFAULTS.kv_dtype,
    server: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Plan for the pools of this running service.", show_default="none"),
    ] = None,
    load: Annotated[bool, typer.Option("--load", help="Load the weights, and compare with plain attention.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Check whether a checkpoint can be served, and how many tokens fit.

    The command needs no service and reads no weights: it builds the model from its config and runs a few tokens, as a
    rank does at its start. It prints the layers, the attention, and the number of tokens that fit. --load also reads
    the weights, which detects missing ones, and compares the logits with those of transformers' own attention: this
    shows whether answers are exact.

    It also prints the fingerprint of the model: a hash of the config, the tokenizer, the chat template, and the name,
    shape, type and three 4 KiB samples of every tensor. Damage elsewhere in a tensor does not change it. Machines whose
    fingerprints differ do not serve together. Exit code 2: the checkpoint is not supported, and the reason is printed.

    Examples:

      longleaf models check ./Qwen3-0.6B
      longleaf models check Qwen/Qwen3-0.6B --world-size 4 --kv-bytes 8000000000
    """
    require_extra("server", "longleaf models check")
    found = resolve(model, yes=yes, is_quiet=as_json)
    config = EngineConfig(
        model=str(found.folder),
        world_size=world_size,
        weights=weights,
        weights_dtype=weights_dtype,
        spare_ranks=spare_ranks,
        kv_bytes=kv_bytes,
        window_keys="replicated" if window_bytes is not None else "sharded",
        window_bytes=window_bytes,
        state_bytes=state_bytes,
        max_sequences=max_sequences,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    config.check()
    fleet = _fleet(server) if server is not None else None
    if fleet is not None:
        config = msgspec.structs.replace(config, block_size=fleet.block_size)
    result = report(config, fleet, has_weights=load, name=found.name)
    if as_json:
        print_json(result)
    else:
        show(result, is_running=fleet is not None)
    if not result.is_supported:
        raise typer.Exit(REFUSED)


def _fleet(server: str) -> Cluster:
    with connect(ServerOptions(server=server)) as client:
        return client.cluster()


def report(config: EngineConfig, fleet: Cluster | None, *, has_weights: bool, name: str | None = None) -> ModelReport:
    """Runs the checks of both roles as subprocesses, because the command imports neither tokenizers nor torch. `name`
    replaces the name of the folder.
    """
    text = _inspect("coordinator.text.compat_check", [config.model], TextReport)
    attention = AttentionReport()
    if not text.reason:
        pools = [str(worker.max_kv_bytes) for worker in fleet.workers] if fleet is not None else []
        given = [msgspec.json.encode(config).decode(), *(["--load"] if has_weights else []), *pools]
        attention = _inspect("workers.compat_check", given, AttentionReport)
    is_supported = not text.reason and not attention.reason
    fingerprint, unread = _fingerprint(Path(config.model))
    return ModelReport(
        model=name or Path(config.model).resolve().name,
        is_supported=is_supported,
        text=text,
        attention=attention,
        fingerprint=fingerprint,
        unread=unread,
        dequantized=read_note(Path(config.model)),
    )


def _fingerprint(folder: Path) -> tuple[Fingerprint | None, str]:
    """The fingerprint of the model in a folder, or the reason why it has none."""
    try:
        return read_fingerprint(folder), ""
    except ModelRefused as error:
        return None, str(error)


def _inspect(module: str, arguments: list[str], kind: type[Report]) -> Report:
    """The report of `module` about a checkpoint. Raises LongleafError if the subprocess fails."""
    # -P: a folder named `tokenizers` where the command was typed must not shadow the library.
    command = [sys.executable, "-P", "-m", module, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise LongleafError(f"{module} ended with exit code {done.returncode}: {''.join(last)}")
    try:
        return msgspec.json.decode("".join(done.stdout.strip().splitlines()[-1:]), type=kind)
    except msgspec.DecodeError as error:
        raise LongleafError(f"{module} printed no valid report: {error}") from None


def show(found: ModelReport, *, is_running: bool) -> None:
    """Prints the verdict, then the figures."""
    if not found.is_supported:
        for reason in found.reasons:
            print(f"{found.model} is not supported: {reason}")
        return
    text, attention = found.text, found.attention
    print(f"{found.model} is supported ({text.architecture}, {attention.dtypes}){exactness_of(attention)}")
    console = output_console()
    console.print(kinds_table(attention.kinds))
    sizes = Table(box=None, show_header=False, pad_edge=False)
    trained = attention.trained or text.max_positions
    sizes.add_row("trained for", f"{trained:,} tokens" if trained else "not in the config")
    sizes.add_row("keys and values", f"{human_bytes(attention.bytes_per_token)} per token")
    if (states := attention.states) is not None:
        layers = f"{len(states.layers)} layers, {spans(states.layers)}"
        sizes.add_row("recurrent states", f"{human_bytes(states.num_bytes)} for each end of a context ({layers})")
    if attention.replicated is not None:
        per_token, per_window = map(human_bytes, msgspec.structs.astuple(attention.replicated))
        message = f"{per_token} per token, and {per_window} on each rank for each end of a context"
        sizes.add_row("", f"{message}, with --window-keys replicated")
    read = "" if attention.has_weights else "; not read without --load"
    sizes.add_row("weights", f"{human_bytes(attention.weight_bytes)} on each rank{read}")
    if attention.other_bytes:
        sizes.add_row("", describe_weights_dtype(attention))
    if attention.share_bytes or attention.share_note:
        sizes.add_row("", describe_shares(attention))
    if attention.share_bytes and attention.spare_ranks:
        sizes.add_row("", describe_spare(attention))
    if attention.exchanges is not None:
        sizes.add_row("exchanges", describe_exchanges(attention.exchanges))
    for number, plan in enumerate(found.plans):
        mode = f", with --window-keys {plan.window_keys}" if len(found.plans) > 1 else ""
        sizes.add_row("" if number else "fits", _plan_summary(plan, is_running) + mode)
    if attention.gpus is not None:
        sizes.add_row("", describe_gpus(attention.gpus))
    console.print(sizes)
    if attention.quantized:
        print(f"weights: {describe_layouts(attention.quantized, attention.dtype)}. {EXACTNESS}")
    if found.dequantized is not None:
        print(describe_dequantized(found.dequantized))
    print("fingerprint:", found.fingerprint.digest if found.fingerprint else f"none: {found.unread}")


def describe_weights_dtype(attention: AttentionReport) -> str:
    """The bytes of quantized weights in both ways."""
    other = "dequantized" if attention.weights_dtype == "stored" else "stored"
    size = human_bytes(attention.other_bytes)
    return f"with --weights-dtype {attention.weights_dtype}, as planned here; {size} with --weights-dtype {other}"


def describe_shares(attention: AttentionReport) -> str:
    """The weights of a rank if they are sharded."""
    if attention.share_note:
        return f"cannot be sharded: {attention.share_note}"
    largest, ranks = human_bytes(max(attention.share_bytes)), count_ranks(len(attention.share_bytes))
    planned = ", as planned here" if attention.weights == "sharded" else ""
    return f"at most {largest} on each of {ranks}, with --weights sharded{planned}"


def describe_spare(attention: AttentionReport) -> str:
    """The room of a rank for sharded weights of lost ranks."""
    is_planned = attention.weights == "sharded"
    effect = "not used for keys and values" if is_planned else "with --weights sharded"
    return f"{human_bytes(attention.spare_bytes)} more for {describe_lost(attention.spare_ranks)}, {effect}"


def describe_gpus(found: GpuPlan) -> str:
    """The tokens that fit on GPUs."""
    beside = f"{human_bytes(found.weight_bytes)} of {found.weights} weights"
    beside += f" and {human_bytes(found.workspace_bytes)} of workspace each"
    where = f"{'a GPU' if found.num_gpus == 1 else f'{found.num_gpus} GPUs'} of {found.total_bytes // 10**9} GB"
    tokens = f"about {found.tokens:,}" if found.tokens else "no"
    return f"{tokens} tokens on {where}, beside {beside}"


def describe_exchanges(found: ExchangeReport) -> str:
    """Exchanges of a decode step with both kinds of weights."""
    layers = f"{found.gathers} gathers, {found.sums} sums, {found.merges} merges, 1 of tokens"
    return f"{found.whole} per decode step; {found.sharded} with --weights sharded ({layers})"


EXACTNESS = "Exact means equal to transformers' `generate` on the dequantized weights."


def describe_dequantized(source: Dequantized) -> str:
    """The origin of the weights, and the meaning of exactness."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in source.kinds.items())
    return f"weights: dequantized to {source.dtype} from {source.file} (tensors: {kinds}). {EXACTNESS}"


def exactness_of(attention: AttentionReport) -> str:
    """The known exactness, for the end of the verdict."""
    if attention.is_exact:
        return " and exact"
    if attention.is_exact is False:
        return f"; not exact: {attention.exactness_note}"
    more = "" if attention.has_weights else "; --load compares it with plain attention"
    return f"; exactness unknown: {attention.exactness_note}{more}"


def kinds_table(kinds: tuple[AttentionKind, ...]) -> Table:
    """A row per kind of layer."""
    table = Table("layers", "numbers", "heads", "key heads", "dim", "attends to")
    for kind in kinds:
        dims = f"{kind.head_dim}" if kind.value_dim is None else f"{kind.head_dim}, values {kind.value_dim}"
        sizes = (str(kind.num_heads), str(kind.num_kv_heads), dims)
        table.add_row(str(len(kind.layers)), spans(kind.layers), *sizes, describe_reach(kind))
    return table


def describe_reach(kind: AttentionKind) -> str:
    """The tokens that a query attends to."""
    if kind.section is not None:
        return f"its section of {kind.section:,} tokens"
    return "all previous tokens" if kind.window is None else f"{kind.window:,} tokens"


def _plan_summary(plan: CapacityPlan, is_running: bool) -> str:
    if plan.reason:
        return f"nothing: {plan.reason}"
    ranks = count_ranks(len(plan.rooms))
    where = f"on the running {ranks}" if is_running else f"on {ranks}"
    ends = f"; {plan.ends:,} ends of contexts, {plan.window_tokens:,} tokens on each rank" if plan.ends else ""
    if plan.num_states:
        ends = f"; {plan.num_states:,} recurrent states on each rank, for {plan.ends:,} contexts of one document"
    if plan.is_unlimited:
        return f"any number of tokens {where}{ends}"
    sizes = {(room.kv_bytes, room.tokens) for room in plan.rooms}
    if len(sizes) > 1:
        each = ", ".join(f"{room.tokens:,} on rank {room.rank}" for room in plan.rooms)
        return f"{plan.tokens:,} tokens {where}: {each}{ends}"
    [(size, tokens)] = sizes
    if len(plan.rooms) == 1:
        return f"{tokens:,} tokens {where}, in {human_bytes(size)}{ends}"
    return f"{plan.tokens:,} tokens {where}: {tokens:,} in {human_bytes(size)} each{ends}"


def spans(layers: tuple[int, ...]) -> str:
    """Abbreviated layer numbers: 0-3, or 0 2 4 … 30 for many separate ones."""
    joined = join((layer, layer + 1) for layer in layers)
    parts = [str(low) if low + 1 == end else f"{low}-{end - 1}" for low, end in joined]
    return " ".join(parts if len(parts) <= 6 else [*parts[:3], "…", parts[-1]])
