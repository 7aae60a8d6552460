"""`longleaf contexts rebuild`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from longleaf.cli.options import AsJson, print_json
from longleaf.config import DtypeName, embedded_model
from longleaf.formatting import human_count
from longleaf.types import Rebuild, RebuildReport


def rebuild(
    url: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL", help="The storage: what --snapshot-url was, else DIR/FINGERPRINT/snapshots."
        ),
    ],
    data_dir: Annotated[Path, typer.Option(help="Folder in which the service keeps contexts.")],
    model: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint.", show_default="the small model in the package")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Numeric type in which it is served.")] = "auto",
    service: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Whose contexts, where several services keep theirs there.", show_default="the only one"
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move a catalog aside that is sound and has contexts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a catalog anew that was lost or damaged, from what the service wrote to storage.

    The service must not run. Contexts are there as they were when they were last written to storage, and parked: keys
    and values come from there when they are asked. What was deleted stays so; what is damaged, or not there as a whole,
    is left out, and told. A catalog that is there is not written into, but moved aside, with the answers that were
    held.

    Example: longleaf contexts rebuild --from s3://bucket/longleaf --data-dir ~/.longleaf --model ./Qwen3-0.6B
    """
    requested = Rebuild(
        url=url,
        data_dir=os.path.abspath(data_dir),
        model=os.path.abspath(model or embedded_model()),
        dtype=dtype,
        service=service,
        may_replace=replace,
    )
    report = _run(requested)
    if as_json:
        print_json(report)
    else:
        _show(report)
        print(f"start the service over it: longleaf serve {_serve_options(requested, report)}")


def _serve_options(asked: Rebuild, report: RebuildReport) -> str:
    """Those without which it would not find contexts, or their keys and values."""
    options = ["--model", asked.model, "--data-dir", asked.data_dir]
    if asked.dtype != "auto":
        options += ["--dtype", asked.dtype]
    url = asked.url if "://" in asked.url else os.path.abspath(asked.url)
    if url != os.path.join(report.folder, "snapshots"):
        options += ["--snapshot-url", url]
    return shlex.join(options)


def _run(asked: Rebuild) -> RebuildReport:
    """Has the coordinator do it, which says itself why it cannot."""
    # -P: a folder named `tokenizers` where the command was typed must not shadow the library.
    command = [
        sys.executable,
        "-P",
        "-m",
        "coordinator.persistence.catalog.rebuild_command",
        msgspec.json.encode(asked).decode(),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return msgspec.json.decode(done.stdout, type=RebuildReport)


def _show(report: RebuildReport) -> None:
    for place in report.moved:
        print(f"moved aside: {place}")
    if report.contexts:
        table = Table("name", "tokens")
        for context in report.contexts:
            table.add_row(context.name, f"{context.tokens:,}")
        Console().print(table)
    for left in report.left_out:
        print(f"left out: {left.name}: {left.reason}")
    if report.other_manifests:
        print(f"passed over: {report.other_manifests:,} manifests of another checkpoint")
    contexts = human_count(len(report.contexts), "context")
    print(f"{report.folder} keeps {contexts} of service {report.service}")
