"""Models of the Hugging Face hub, through huggingface_hub.

That library locates the hub (HF_ENDPOINT), authenticates (HF_TOKEN, `hf auth login`), stores files (HF_HOME), resumes
broken transfers, and shows the progress. A repeated call fetches only missing files. Only safetensors, JSON files, chat
templates and vocabularies are downloaded: neither pickles nor code.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from longleaf.checkpoints.interaction import Interaction
from longleaf.checkpoints.source import HubModel
from longleaf.errors import LongleafError, StartError, Unavailable
from longleaf.fingerprint import CONFIG
from longleaf.formatting import human_bytes, human_count, human_seconds

DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
LEFT_OUT = ("*/*", "consolidated*")
"""Patterns of files that are not downloaded: those of sub-folders, and second copies of weights in Mistral's format."""
TIMEOUT_SECONDS = 20.0
COMMIT_DIGITS = 12
NETWORK_ERRORS = ("ConnectError", "TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError")
"""Names of classes of the HTTP library that huggingface_hub uses; which library that is depends on its version."""


def fetch_to_cache(model: HubModel, interaction: Interaction) -> Path:
    """The folder of the model in the cache of huggingface_hub; downloads missing files.

    If the hub cannot be reached, a complete copy in the cache is used.
    Raises StartError if the hub refuses the model or it has no safetensors, and Unavailable if a retry may help.
    """
    try:
        _check_files(model, interaction)
    except Unavailable as error:
        cached = _cached(model)
        if cached is None:
            raise
        interaction.notify(f"using the downloaded copy of {model}: {error}")
        return cached
    # with the name of the branch instead of the commit, the library finds this copy later without a network
    return Path(_download(model, model.revision, interaction))


def fetch_to_folder(model: HubModel, folder: Path, interaction: Interaction) -> Path:
    """Downloads the model into a temporary folder beside `folder`, and returns that. A repeated call continues.

    Raises the errors of `fetch_to_cache`.
    """
    commit = _check_files(model, interaction)
    partial = folder.with_name(f"{folder.name}.{commit[:COMMIT_DIGITS]}.partial")
    _download(model, commit, interaction, local_dir=str(partial))
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes for resuming
    return partial


def _library() -> Any:
    """The package huggingface_hub, imported late because it takes half a second."""
    import huggingface_hub

    return huggingface_hub


def _check_files(model: HubModel, interaction: Interaction) -> str:
    """Checks that the model has a config and safetensors, and returns the commit of its revision."""
    library = _library()
    try:
        info = library.HfApi(library_name="longleaf").model_info(
            model.repository, revision=model.revision, timeout=TIMEOUT_SECONDS, files_metadata=True
        )
    except Exception as error:  # the library raises errors of several packages
        _raise(model, error)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    chosen = list(library.utils.filter_repo_objects(sizes, allow_patterns=DOWNLOADED, ignore_patterns=LEFT_OUT))
    if not any(name.endswith(".safetensors") for name in chosen):
        raise StartError(f"{model} has no weights in safetensors{_other_weights(sizes)}")
    if CONFIG not in chosen:
        raise StartError(f"{model} has no {CONFIG}, so it is not a checkpoint for transformers")
    total = sum(sizes[name] for name in chosen)
    interaction.notify(f"{model} on {_host()}: {human_count(len(chosen), 'file')}, {human_bytes(total)}")
    return str(info.sha)


def _other_weights(names: dict[str, int]) -> str:
    """Describes weights in other formats, for an error."""
    if gguf := sorted(name for name in names if name.endswith(".gguf")):
        return f" but in GGUF files: download one, such as {gguf[0]}, and give --model FILE.gguf"
    if pickles := sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))):
        return f" but in {pickles[0]}: pickles can execute code, and are not downloaded"
    return ""


def _download(model: HubModel, revision: str | None, interaction: Interaction, **options: Any) -> str:
    library = _library()
    if not interaction.has_progress_bars:
        library.utils.disable_progress_bars()
    try:
        return library.snapshot_download(
            model.repository,
            revision=revision,
            allow_patterns=DOWNLOADED,
            ignore_patterns=LEFT_OUT,
            library_name="longleaf",
            **options,
        )
    except Exception as error:
        _raise(model, error)


def _cached(model: HubModel) -> Path | None:
    """The folder of a complete copy in the cache, if there is one."""
    library = _library()
    try:
        found = library.snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=DOWNLOADED,
            ignore_patterns=LEFT_OUT,
            local_files_only=True,
        )
    except Exception:  # there is none, or it is incomplete
        return None
    return Path(found)


def _host() -> str:
    """The hub's host, as in HF_ENDPOINT."""
    return str(_library().constants.ENDPOINT).partition("://")[2]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _raise(model: HubModel, error: Exception) -> NoReturn:
    raise describe(model, error) from error


def describe(model: HubModel, error: Exception) -> LongleafError:
    """The error of a failed download, as one sentence."""
    causes = list(_causes(error))
    for each in causes:
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            place = each.filename or _library().constants.HF_HOME
            return Unavailable(
                f"{model} does not fit: no space is left at {place}; free some, or set HF_HOME to another folder, and "
                "repeat the command, which continues"
            )
    for each in causes:
        response = getattr(each, "response", None)
        if response is not None and hasattr(response, "status_code"):
            return _refusal(model, each, response)
    names = {cls.__name__ for each in causes for cls in type(each).__mro__}
    if "OfflineModeIsEnabled" in names:
        return Unavailable(f"{model} is not in the cache, and HF_HUB_OFFLINE forbids downloads")
    if "HFValidationError" in names:
        return StartError(f"{model.repository} is not a valid name on the hub")
    if names.intersection(NETWORK_ERRORS):
        return Unavailable(
            f"{_host()} cannot be reached for {model} ({_first_line(causes[-1])}): check the network, HF_ENDPOINT and "
            "HTTPS_PROXY; a repeated command continues with the missing files"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return Unavailable(f"{model} cannot be written to {error.filename}: {os.strerror(error.errno)}")
    return Unavailable(
        f"{model} was not downloaded: {_first_line(error)}; a repeated command continues with the missing files"
    )


def _refusal(model: HubModel, error: BaseException, response: Any) -> LongleafError:
    """The error for an HTTP status of the hub."""
    status, code = int(response.status_code), response.headers.get("X-Error-Code")
    page = f"{_library().constants.ENDPOINT}/{model.repository}"
    if code == "GatedRepo":
        return StartError(f"{model} is gated: accept its conditions at {page}, and set HF_TOKEN to its token")
    if code == "RevisionNotFound":
        return StartError(f"{model.repository} has no revision {model.revision} on {_host()}")
    has_token = _library().get_token() is not None
    if status == 401 and has_token and code != "RepoNotFound":
        return StartError(f"{_host()} rejects the token for {model}: check HF_TOKEN")
    if status in (401, 404):
        advice = "or the token in use cannot read it" if has_token else "or it is private: set HF_TOKEN"
        return StartError(f"{model.repository} is neither a folder here nor a model on {_host()}, {advice}")
    if status == 403:
        return StartError(f"{_host()} denies access to {model}: the token in use lacks the permission")
    if status == 429:
        seconds = _retry_seconds(response)
        when = "later" if seconds is None else f"in {human_seconds(seconds)}"
        advice = "" if has_token else "; HF_TOKEN raises the limit"
        return Unavailable(f"{_host()} limits the rate of downloads: repeat the command {when}{advice}", seconds)
    if status >= 500:
        return Unavailable(f"{_host()} failed with HTTP status {status}: repeat the command later, which continues")
    return StartError(f"{model} was refused by {_host()}: {_first_line(error)}")


def _retry_seconds(response: Any) -> float | None:
    """The delay that the hub asks for."""
    stated = response.headers.get("Retry-After", "")
    if stated.isdigit():
        return float(stated)
    limits = _library().utils.parse_ratelimit_headers(response.headers)
    return None if limits is None else float(limits.reset_in_seconds)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
