"""Length limits of answers."""

from longleaf.types import GenerateOptions


def with_length(options: GenerateOptions, given: int | None) -> GenerateOptions:
    """The options for an answer of at most `given` tokens; None uses the available capacity."""
    return options | ({"until_full": True} if given is None else {"max_tokens": given})
