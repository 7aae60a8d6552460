"""`longleaf models fetch` and `longleaf models convert`."""

from pathlib import Path
from typing import Annotated

import typer

from longleaf.checkpoints import hub, wheel_model
from longleaf.checkpoints.gguf_conversion import WeightDtype
from longleaf.checkpoints.gguf_conversion import convert as convert_file
from longleaf.checkpoints.source import GgufFile, HubModel, PackagedModel, WheelModel, parse_source
from longleaf.checkpoints.storage_copy import copy_to_partial
from longleaf.cli.model_option import Yes, interaction, resolve
from longleaf.errors import InvalidArgument, StartError
from longleaf.extras import require_extra
from longleaf.fingerprint import read_fingerprint


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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    dtype: Annotated[
        WeightDtype,
        typer.Option(help="Type of the weights; float32 holds dequantized weights without rounding."),
    ] = "float32",
) -> None:
    """Convert a GGUF file to a checkpoint in safetensors.

    The weights are dequantized, and saved with the tokenizer and the chat template of the file. Answers are exact for
    the dequantized weights: they equal those of transformers' `generate` for the same file. `longleaf serve --model
    FILE.gguf` converts a file once, into the cache. Exit code 2: the file cannot be used, or memory or disk do not
    suffice.

    Example: longleaf models convert SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2
    """
    require_extra("server", "longleaf models convert")
    convert_file(file, folder, dtype, interaction(yes=True))
    typer.echo(f"{folder}: {read_fingerprint(folder).digest}")


def _checked(folder: Path, wanted: str | None) -> str:
    """The folder's fingerprint. Raises ModelRefused if it has none, and InvalidArgument if it differs from `wanted`."""
    digest = read_fingerprint(folder).digest
    if wanted and digest != wanted:
        raise InvalidArgument("fingerprint", f"{folder} has {digest}, not {wanted}")
    return digest
