"""`longleaf contexts rebuild`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from longleaf.cli.console import output_console
from longleaf.cli.model_option import resolve
from longleaf.cli.options import AsJson, print_json
from longleaf.config import DtypeName, embedded_model
from longleaf.extras import require_extra
from longleaf.formatting import human_count
from longleaf.types import Rebuild, RebuildReport


def rebuild(
    url: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="URL",
            help="The storage: the --snapshot-url of the service, else DIR/FINGERPRINT/snapshots.",
        ),
    ],
    data_dir: Annotated[Path, typer.Option(help="The --data-dir of the service.", metavar="DIR")],
    model: Annotated[
        str | None,
        typer.Option(help="The --model of the service.", show_default="the packaged look-up model", metavar="MODEL"),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="The --dtype of the service.")] = "auto",
    service: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Service whose contexts to restore, if several services used the storage.",
            show_default="the only one",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Allow replacing a valid catalog that has contexts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a lost or damaged catalog from storage.

    The service must not run. Contexts are restored as they were last written to storage. They are evicted: their keys
    and values are loaded on the next request. Deleted contexts stay deleted. Damaged or incomplete contexts are skipped
    and listed with the reason. An existing catalog is moved aside, together with its resumable answers.

    Example:

      longleaf contexts rebuild --from s3://bucket/longleaf --data-dir ~/.longleaf
    """
    require_extra("server", "longleaf contexts rebuild")
    requested = Rebuild(
        url=url,
        data_dir=os.path.abspath(data_dir),
        model=os.path.abspath(resolve(model).folder if model else embedded_model()),
        dtype=dtype,
        service=service,
        may_replace=replace,
    )
    report = _run(requested)
    if as_json:
        print_json(report)
    else:
        _show(report)
        print(f"start the service: longleaf serve {_serve_options(requested, report)}")


def _serve_options(request: Rebuild, report: RebuildReport) -> str:
    """The options that the service needs to find the contexts, and their keys and values."""
    options = ["--model", request.model, "--data-dir", request.data_dir]
    if request.dtype != "auto":
        options += ["--dtype", request.dtype]
    url = request.url if "://" in request.url else os.path.abspath(request.url)
    if url != os.path.join(report.folder, "snapshots"):
        options += ["--snapshot-url", url]
    return shlex.join(options)


def _run(options: Rebuild) -> RebuildReport:
    """Runs the coordinator's command, which prints its own errors."""
    # -P: a folder named `tokenizers` where the command was typed must not shadow the library.
    command = [
        sys.executable,
        "-P",
        "-m",
        "coordinator.persistence.catalog.rebuild_command",
        msgspec.json.encode(options).decode(),
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
        output_console().print(table)
    for left in report.skipped:
        print(f"skipped: {left.name}: {left.reason}")
    if report.other_manifests:
        print(f"ignored: {report.other_manifests:,} manifests of other checkpoints")
    contexts = human_count(len(report.contexts), "context")
    print(f"{report.folder} has {contexts} of service {report.service}")
