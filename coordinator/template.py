"""Chat templates, rendered as transformers renders them: sandboxed Jinja with the same few helpers."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longleaf.errors import ModelRefused

MARK = "LONGLEAFUSERTEXT"
"""Stands for the user's text while the template is rendered."""


def split_template(source: str, special_tokens: dict[str, str]) -> tuple[str, str]:
    """What the template puts before and after the only message of a user, up to where the model answers.

    Raises ModelRefused when the template fails or does not show the message exactly once.
    """
    messages = [{"role": "user", "content": MARK}]
    try:
        template = _environment().from_string(source)
        text = template.render(messages=messages, tools=None, add_generation_prompt=True, **special_tokens)
    except Exception as error:  # templates are programs: they may raise anything
        raise ModelRefused(f"the chat template cannot be rendered: {error}") from error
    before, mark, after = text.partition(MARK)
    if not mark or MARK in after:
        raise ModelRefused("the chat template does not show the user's message exactly once")
    return before, after


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    untyped: Any = environment
    untyped.filters["tojson"] = _to_json
    untyped.globals["raise_exception"] = _raise_exception
    untyped.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
