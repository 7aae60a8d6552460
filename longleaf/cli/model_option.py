"""Resolution of the model that a command names: questions and progress on the terminal."""

import sys
from typing import Annotated

import msgspec
import typer

from longleaf.checkpoints.interaction import Interaction
from longleaf.checkpoints.resolve import LocalModel, resolve_model
from longleaf.errors import StartError
from longleaf.rank_choice import choose_ranks, this_machine
from longleaf.service_settings import ServiceConfig

Yes = Annotated[bool, typer.Option("--yes", help="Download the model smollm2 without asking.")]
MODEL_HELP = "Folder of a checkpoint, ORG/NAME[@REVISION], FILE.gguf, smollm2, or a URL."
"""Help of the models that commands take."""


def interaction(*, yes: bool, is_quiet: bool = False) -> Interaction:
    """Messages go to standard error. `yes` answers every question; `is_quiet` hides progress bars."""

    def notify(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def confirm(question: str) -> bool:
        if yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise StartError(f"a download needs consent: give --yes. {question}")
        return typer.confirm(question, default=True, err=True)

    return Interaction(notify, confirm, has_progress_bars=sys.stderr.isatty() and not is_quiet)


def resolve(model: str, *, yes: bool = False, is_quiet: bool = False) -> LocalModel:
    """The local folder of `model`, downloaded or converted if necessary."""
    return resolve_model(model, interaction(yes=yes, is_quiet=is_quiet))


def with_local_model(config: ServiceConfig, *, yes: bool, is_quiet: bool) -> ServiceConfig:
    """The settings with a local folder as the model. Raises InvalidArgument for other invalid settings first, so that
    nothing is downloaded in vain."""
    config = choose_ranks(config, this_machine())
    config.check_all_but_model()
    found = resolve(config.engine.model, yes=yes, is_quiet=is_quiet)
    if found.is_fetched and config.ray_address is not None and not is_quiet:
        notice = f"ranks on other machines need the model in the same folder, {found.folder.absolute()}"
        print(f"{notice}: run `longleaf models fetch` with the same name there", file=sys.stderr, flush=True)
    engine = msgspec.structs.replace(config.engine, model=str(found.folder))
    return msgspec.structs.replace(config, engine=engine, model_name=config.model_name or found.name)
