"""How long an answer may be."""

from longleaf.types import GenerateOptions


def with_length(options: GenerateOptions, given: int | None) -> GenerateOptions:
    """The options of an answer of so many tokens at most; None takes what is left."""
    return options | ({"until_full": True} if given is None else {"max_tokens": given})
