"""Chat templates, rendered as transformers renders them: sandboxed Jinja with the same few helpers.

`python -m coordinator.text.template SECONDS` renders the one on its standard input; renderer.py starts it.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longleaf.errors import ModelRefused

MARK = "LONGLEAFUSERTEXT"
"""Stands for the user's text while the template is rendered."""
MAX_CHARACTERS = 1 << 20
"""What a template may put around a message."""
MAX_MEMORY = 1 << 30
"""Bytes of address space of the process that renders."""


def split_template(source: str, special_tokens: dict[str, str]) -> tuple[str, str]:
    """What the template puts before and after the only message of a user, up to where the model answers.

    Raises ModelRefused when the template fails or does not show the message exactly once.
    """
    messages = [{"role": "user", "content": MARK}]
    try:
        template = _environment().from_string(source)
        text = template.render(messages=messages, tools=None, add_generation_prompt=True, **special_tokens)
    except Exception as error:  # templates are programs: they may raise anything
        reason = str(error) or type(error).__name__
        raise ModelRefused(f"the chat template cannot be rendered: {reason}") from error
    if len(text) > MAX_CHARACTERS:
        raise ModelRefused(f"the chat template makes {len(text):,} characters of a message, at most {MAX_CHARACTERS:,}")
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


def _limit(seconds: int) -> None:
    """The system ends this process when it has used so much processor time, and gives it little memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        before, after = split_template(request["source"], request["special_tokens"])
    except ModelRefused as error:
        return {"reason": str(error)}
    return {"before": before, "after": after}


if __name__ == "__main__":
    _limit(int(sys.argv[1]))
    print(json.dumps(_answer(json.load(sys.stdin))))
