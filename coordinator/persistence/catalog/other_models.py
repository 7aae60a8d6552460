"""Start-up notes on contexts in the data folder that the served model cannot use."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from coordinator.persistence.catalog.catalog import read_only_names
from coordinator.persistence.catalog.data_folder import DataFolder
from longleaf.errors import CatalogError
from longleaf.formatting import human_count, human_list

MAX_NAMED = 5
"""Maximum number of contexts that a note lists by name."""


def describe_contexts(names: Iterable[str]) -> str:
    """The number of contexts, and their first names."""
    ordered = sorted(names)
    return f"{human_count(len(ordered), 'context')} ({human_list(ordered, MAX_NAMED)})"


def describe_unusable(folder: DataFolder, model: str, changed: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each other model in the data folder, and for the contexts that earlier contents of `model` have read.
    `changed` gives the differences by the names of the latter. Unreadable folders are skipped."""
    names_of = dict[str, set[str]]()
    for path, model_file in folder.other_models():
        if model_file.model != model:
            with suppress(CatalogError):
                names_of.setdefault(model_file.model, set()).update(read_only_names(path))
    data_dir = folder.path.parent
    found = [
        f"{data_dir} also has {describe_contexts(names)} of another model: serve {other} to use "
        + ("it" if len(names) == 1 else "them")
        for other, names in sorted(names_of.items())
        if names
    ]
    names_by_change = dict[str, list[str]]()
    for name, change in changed.items():
        names_by_change.setdefault(change, []).append(name)
    found += [
        f"{data_dir} also has {describe_contexts(names)} of this model in an earlier state: {change}"
        for change, names in sorted(names_by_change.items())
    ]
    return tuple(found)
