"""`longleaf serve`: becomes `python -m coordinator` with the same options."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from longleaf.commands.options import AsJson, KvDtype
from longleaf.config import (
    DEFAULT_PORT,
    DtypeName,
    EngineConfig,
    Launcher,
    MergeChoice,
    PartialDtype,
    PrefillName,
    WindowKeys,
    embedded_model,
)
from longleaf.launch import coordinator_command
from longleaf.topology import count_ranks

_DEFAULTS = EngineConfig(model="")


def serve(
    model: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint.", show_default="the small model in the package")
    ] = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks (worker processes).")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 lets the system choose.")] = DEFAULT_PORT,
    launcher: Annotated[Launcher, typer.Option(help="What starts the ranks.")] = "ray",
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster to join, such as auto.", show_default="start one here")
    ] = None,
    merge: Annotated[
        MergeChoice, typer.Option(help="How partial attention is merged; auto measures at the start.")
    ] = _DEFAULTS.merge,
    partials: Annotated[
        PartialDtype, typer.Option(help="Type in which partials travel; bfloat16 rounds them by 2^-8 per hop.")
    ] = _DEFAULTS.partials,
    prefill: Annotated[
        PrefillName, typer.Option(help="What ranks gather while they read; auto: what has fewer bytes.")
    ] = _DEFAULTS.prefill,
    chunk_size: Annotated[int, typer.Option(help="Prompt tokens read per step.")] = _DEFAULTS.chunk_size,
    block_size: Annotated[int, typer.Option(help="Tokens per block of the pool.")] = _DEFAULTS.block_size,
    kv_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of keys and values per rank.", show_default="40 % of free memory over the ranks"),
    ] = None,
    window_keys: Annotated[
        WindowKeys,
        typer.Option(
            help="Where keys of windowed layers lie: all of them, each on its rank, or the last ones on every rank, "
            "which then exchange nothing in these layers."
        ),
    ] = _DEFAULTS.window_keys,
    window_bytes: Annotated[
        int | None,
        typer.Option(
            help="With --window-keys replicated: the part of --kv-bytes for windowed layers.",
            show_default="by generations at once, at most half",
        ),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Numeric type; auto takes the checkpoint's.")] = _DEFAULTS.dtype,
    kv_dtype: KvDtype = _DEFAULTS.kv_dtype,
    threads: Annotated[int, typer.Option(help="CPU threads of each rank.")] = _DEFAULTS.threads_per_rank,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds a step of few tokens may take before the fleet is given up.")
    ] = _DEFAULTS.step_timeout,
    target_itl_ms: Annotated[
        float, typer.Option(help="Milliseconds between tokens that running streams should keep while prompts are read.")
    ] = _DEFAULTS.target_itl_ms,
    allow_long: Annotated[
        bool, typer.Option("--allow-long", help="Take what goes beyond the positions that the model was trained for.")
    ] = _DEFAULTS.allow_long,
    as_json: AsJson = False,
) -> None:
    """Serve a model until interrupted.

    Prints `listening on HOST:PORT` once it is ready; with --json, {"address": "HOST:PORT"}.

    Example: longleaf serve --model ./Qwen3-0.6B --world-size 4
    """
    config = EngineConfig(
        model=str(model or embedded_model()),
        world_size=world_size,
        merge=merge,
        partials=partials,
        prefill=prefill,
        chunk_size=chunk_size,
        block_size=block_size,
        kv_bytes=kv_bytes,
        window_keys=window_keys,
        window_bytes=window_bytes,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads_per_rank=threads,
        step_timeout=step_timeout,
        target_itl_ms=target_itl_ms,
        allow_long=allow_long,
    )
    command = coordinator_command(
        config, host=host, port=port, launcher=launcher, ray_address=ray_address, as_json=as_json
    )
    print(f"starting {count_ranks(world_size)} ({launcher}) …", file=sys.stderr, flush=True)
    os.execv(command[0], command)
