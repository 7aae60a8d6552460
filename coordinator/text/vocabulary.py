"""Which token ids the model knows."""

from collections.abc import Sequence

from longleaf.errors import InvalidArgument

STEP_TOKENS = 1 << 16
"""Number of ids checked at once; other threads run in between."""


def check_known(token_ids: Sequence[int], vocabulary_size: int, field: str = "token_ids", offset: int = 0) -> None:
    """Raises InvalidArgument for the first id that is not in the vocabulary. Of `token_ids` its place is named, which
    came after `offset` others; of another `field`, such as a text, only that.

    Ids of a text are checked as well: some tokenizers have tokens for which the model has no embedding.
    """
    for start in range(0, len(token_ids), STEP_TOKENS):
        step = token_ids[start : start + STEP_TOKENS]
        if not 0 <= min(step) <= max(step) < vocabulary_size:
            wrong = next(i for i, token_id in enumerate(step) if not 0 <= token_id < vocabulary_size)
            place = f"{field}.ids[{offset + start + wrong}]" if field == "token_ids" else field
            raise InvalidArgument(place, f"{step[wrong]} is not in the vocabulary of {vocabulary_size:,} tokens")
