"""Parts of grammars in llguidance's dialect of Lark."""

import json
from typing import Any

from longleaf.errors import InvalidArgument

ENGINE_OPTIONS = "x-guidance"
"""The keyword of a schema that holds options of llguidance."""
MAX_INDENT = 32
"""Characters of an indentation."""
WHITESPACE = rf"(\x20|\x0D?\x0A[\x20\x09]{{0,{MAX_INDENT}}})"
"""The white space that printers of JSON write between two tokens: a space, or a line break and an indentation. With
unlimited white space, a model may write nothing else up to the limit of its answer."""

ANY = r"(.|\n)"
"""Any character, as part of a regular expression."""


def check_options(schema: dict[str, Any], field: str) -> None:
    """Raises InvalidArgument for a schema that sets options of llguidance."""
    if ENGINE_OPTIONS in schema:
        raise InvalidArgument(field, f"{ENGINE_OPTIONS} is not supported: the service sets the options")


def json_rule(schema: dict[str, Any]) -> str:
    """The part of a rule in llguidance's dialect of Lark that derives the JSON which a schema accepts."""
    return f"%json {json.dumps({**schema, ENGINE_OPTIONS: {'whitespace_pattern': WHITESPACE}})}"


def pattern_of(text: str) -> str:
    """The regular expression that matches exactly this text."""
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):X}}}" for each in text)
