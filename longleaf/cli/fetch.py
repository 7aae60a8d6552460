"""`longleaf models fetch` and `longleaf models convert`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from longleaf.checkpoints import hub, wheel_model
from longleaf.checkpoints.gguf_conversion import WeightDtype
from longleaf.checkpoints.gguf_conversion import convert as convert_file
from longleaf.checkpoints.quantization import QuantizationReport, QuantizedKind, quantize
from longleaf.checkpoints.source import GgufFile, HubModel, PackagedModel, WheelModel, parse_source
from longleaf.checkpoints.storage_copy import copy_to_partial
from longleaf.cli.console import output_console
from longleaf.cli.model_option import Yes, interaction, resolve
from longleaf.cli.options import AsJson, print_json
from longleaf.errors import InvalidArgument, StartError
from longleaf.extras import require_extra
from longleaf.fingerprint import read_fingerprint
from longleaf.formatting import human_bytes


def fetch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="ORG/NAME[@REVISION] on the Hugging Face hub, smollm2 (a small chat model from the package index), or "
            "the URL of a folder: s3://, https:// or file://.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Folder to create.", show_default="the cache, where serve finds it"),
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Required fingerprint of the checkpoint.", show_default="any", metavar="HASH")
    ] = None,
    yes: Yes = False,
) -> None:
    """Download a checkpoint, and print its fingerprint.

    The download uses a temporary folder until it is complete; from the hub, a repeated command continues it. An
    existing folder is checked, and not fetched again. Models of the hub use the cache and the token of huggingface_hub
    (HF_HOME, HF_TOKEN, HF_ENDPOINT); only safetensors, tokenizers and settings are downloaded. Exit code 2: the
    fingerprint differs from --fingerprint, or the model does not exist or is refused; 1: a retry may help.

    Examples:

      longleaf models fetch HuggingFaceTB/SmolLM2-135M-Instruct
      longleaf models fetch Qwen/Qwen3-0.6B ./Qwen3-0.6B
      longleaf models fetch s3://models/Qwen3-8B /models/Qwen3-8B
    """
    require_extra("server", "longleaf models fetch")
    if folder is None:
        found = resolve(model, yes=yes).folder
        typer.echo(f"{found}: {_checked(found, fingerprint)}")
        return
    if folder.exists():
        typer.echo(f"{folder} exists: {_checked(folder, fingerprint)}")
        return
    partial = _download(model, folder, yes=yes)
    digest = _checked(partial, fingerprint)
    if partial != folder:
        partial.rename(folder)
    typer.echo(f"{folder}: {digest}")


def _download(model: str, folder: Path, *, yes: bool) -> Path:
    """Downloads the model, and returns its folder: `folder`, or one beside it that must be renamed."""
    user = interaction(yes=yes)
    match parse_source(model):
        case HubModel() as named:
            folder.parent.mkdir(parents=True, exist_ok=True)
            return hub.fetch_to_folder(named, folder, user)
        case WheelModel():
            wheel_model.fetch_to_folder(folder, user)
            return folder
        case GgufFile():
            raise StartError(f"{model} is a GGUF file: use `longleaf models convert`")
        case PackagedModel():
            raise StartError(f"{model} is in the package: `longleaf serve` finds it")
        case _:
            return copy_to_partial(model, folder)


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="GGUF file, or folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    kind: Annotated[
        QuantizedKind | None,
        typer.Option("--to", help="Quantize a checkpoint: FP8 in blocks of 128x128, or INT4 in groups of up to 128."),
    ] = None,
    dtype: Annotated[
        WeightDtype | None,
        typer.Option(
            help="Type of the weights of a GGUF file; float32 holds dequantized weights without rounding.",
            show_default="float32",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a GGUF file to a checkpoint in safetensors, or quantize a checkpoint.

    The weights of a GGUF file are dequantized, and saved with the tokenizer and the chat template of the file. Answers
    are exact for the dequantized weights: they equal those of transformers' `generate` for the same file. `longleaf
    serve --model FILE.gguf` converts a file once, into the cache.

    With --to, the linear layers of a checkpoint in 16 or 32 bits are rounded to the nearest numbers of 8 or 4 bits. The
    error of each layer is printed. The embedding, the head and routers keep their type.

    Exit code 2: the source cannot be used, or memory or disk do not suffice.

    Examples:

      longleaf models convert SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2
      longleaf models convert ./Qwen3-0.6B ./Qwen3-0.6B-int4 --to int4
    """
    require_extra("server", "longleaf models convert")
    if not source.is_dir():
        if kind is not None:
            raise InvalidArgument("to", "a GGUF file is dequantized; convert the folder that results")
        convert_file(source, folder, dtype or "float32", interaction(yes=True))
        typer.echo(f"{folder}: {read_fingerprint(folder).digest}")
        return
    if kind is None:
        raise InvalidArgument("to", f"{source} is a folder: give fp8-block or int4")
    if dtype is not None:
        raise InvalidArgument("dtype", "applies to GGUF files only")
    report = quantize(source, folder, kind)
    if as_json:
        print_json(report)
        return
    output_console().print(errors_table(report))
    typer.echo(
        f"{folder}: {len(report.layers)} weights in {report.kind}, {human_bytes(report.num_bytes)} instead of "
        f"{human_bytes(report.num_source_bytes)}; {read_fingerprint(folder).digest}"
    )


def errors_table(report: QuantizationReport) -> Table:
    """A row per quantized weight."""
    table = Table("weight", "shape", "relative error", "largest error")
    for layer in report.layers:
        shape = " x ".join(map(str, layer.shape))
        table.add_row(layer.name, shape, f"{layer.relative_error:.2%}", f"{layer.largest_error:.2%}")
    return table


def _checked(folder: Path, wanted: str | None) -> str:
    """The folder's fingerprint. Raises ModelRefused if it has none, and InvalidArgument if it differs from `wanted`."""
    digest = read_fingerprint(folder).digest
    if wanted and digest != wanted:
        raise InvalidArgument("fingerprint", f"{folder} has {digest}, not {wanted}")
    return digest
