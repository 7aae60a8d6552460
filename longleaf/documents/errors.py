"""Reasons why a file has no text, as predicates: "is encrypted", "has no page with text"."""


class Unreadable(Exception):
    """A file, or a member of an archive, that cannot be read. The message is a predicate of the file."""


class LimitExceeded(Exception):
    """A limit that applies to the whole file, with all members. The message is a predicate of the file."""


class NotText(Unreadable):
    """A file that is not text in its encoding."""
