"""Output and questions of a command that downloads or converts a model."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interaction:
    """The user's side of a download."""

    notify: Callable[[str], None]
    """Shows a line."""
    confirm: Callable[[str], bool]
    """Asks a question, and returns whether the answer is yes. May raise StartError if there is no user to ask."""
    has_progress_bars: bool
