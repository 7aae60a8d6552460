"""Names of fields in APIs whose requests are converted to chat requests."""

import re
from collections.abc import Sequence
from typing import NamedTuple

MESSAGE = re.compile(r"^messages\[(\d+)\]")
Replacement = tuple[re.Pattern[str], str]


class FieldNames(NamedTuple):
    """Converts the name of a field of a chat request to its name in another API."""

    replacements: Sequence[Replacement]
    """Patterns, and their replacements; the first pattern that is found is replaced."""
    messages: tuple[str, ...]
    """For each message of the conversation, the field that it belongs to."""

    def __call__(self, param: str) -> str:
        match = MESSAGE.match(param)
        if match is not None and int(match[1]) < len(self.messages):
            name = self.messages[int(match[1])]
            param = name + param[match.end() :] if name.endswith("]") else name
        for pattern, name in self.replacements:
            if pattern.search(param):
                return pattern.sub(name, param)
        return param
