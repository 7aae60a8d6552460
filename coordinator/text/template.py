"""Chat templates, rendered as transformers renders them: sandboxed Jinja with the same few helpers.

A template sees roles, and a mark in the place of each text: what it makes of them is cut at the marks, and no text can
be taken for a part of it. `python -m coordinator.text.template SECONDS` renders the one on its standard input;
renderer.py starts it.
"""

import json
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARK = "LONGLEAF{:03}TEXT"
"""Stands for the text of the message of this number while the template is rendered."""
_MARK = re.compile("LONGLEAF([0-9]{3})TEXT")
MAX_CHARACTERS = 1 << 20
"""What a template may put around messages."""
MAX_MEMORY = 1 << 30
"""Bytes of address space of the process that renders."""
MAX_REASON = 500
"""Characters of what a template says when it refuses."""
Shape = tuple[str, ...]
"""The roles of messages, in their order."""
_Show = Callable[..., str]
"""Renders `messages`."""


class Rendering(NamedTuple):
    """What a template makes of a shape."""

    parts: tuple[str, ...] = ()
    """What stands before, between and after the texts, up to where the model answers; empty when there is a reason."""
    reason: str = ""
    """What the template does instead, as in `the chat template leaves out the user's message`."""
    message: int | None = None
    """Number of the message that is to blame, if it is one."""


def render_shapes(
    source: str, special_tokens: dict[str, str], shapes: Sequence[Shape], now: datetime | None = None
) -> list[Rendering]:
    """What the template makes of each shape; `now` is what it is told when it asks for the time."""
    return list(_render_each(source, special_tokens, shapes, now or datetime.now()))


def _render_each(
    source: str, special_tokens: dict[str, str], shapes: Sequence[Shape], now: datetime
) -> Iterator[Rendering]:
    try:
        template = _environment(now).from_string(source)
    except Exception as error:
        yield from [Rendering(reason=_told(error))] * len(shapes)
        return
    show = partial(template.render, tools=None, add_generation_prompt=True, **special_tokens)
    for shape in shapes:
        yield _render(show, shape)


def _render(show: _Show, shape: Shape) -> Rendering:
    messages = [{"role": role, "content": MARK.format(number)} for number, role in enumerate(shape)]
    try:
        text = show(messages=messages)
    except Exception as error:  # templates are programs: they may raise anything
        return Rendering(reason=_told(error), message=_refused(show, messages))
    if len(text) > MAX_CHARACTERS:
        return Rendering(reason=f"makes {len(text):,} characters of the messages, at most {MAX_CHARACTERS:,}")
    return _cut(text, shape)


def _told(error: Exception) -> str:
    return f"cannot be rendered: {str(error) or type(error).__name__}"[:MAX_REASON]


def _refused(show: _Show, messages: list[dict[str, str]]) -> int:
    """The message with which the template begins to fail, when those before it are rendered without it: templates go
    from message to message."""
    good, bad = 0, len(messages)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            show(messages=messages[:middle])
        except Exception:
            bad = middle
        else:
            good = middle
    return bad - 1


def _cut(text: str, shape: Shape) -> Rendering:
    pieces = _MARK.split(text)
    parts, numbers = tuple(pieces[::2]), [int(number) for number in pieces[1::2]]
    counts = Counter(numbers)
    for number, role in enumerate(shape):
        if counts[number] != 1:
            did = "leaves out" if not counts[number] else "repeats"
            return Rendering(reason=f"{did} the {role}'s message", message=number)
    for number, role in enumerate(shape):
        if numbers[number] != number:
            return Rendering(reason=f"moves the {role}'s message to another place", message=number)
    if len(numbers) > len(shape):
        return Rendering(reason="shows more messages than there are")
    return Rendering(parts)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    untyped: Any = environment
    untyped.filters["tojson"] = _to_json
    untyped.globals["raise_exception"] = _raise_exception
    untyped.globals["strftime_now"] = now.strftime
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


def _limit(seconds: int) -> None:
    """The system ends this process when it has used so much processor time, and gives it little memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def _answer(request: dict[str, Any]) -> None:
    """Each rendering in a line, once it is made: the next one may end this process."""
    now = datetime.fromisoformat(request["now"])
    for rendering in _render_each(request["source"], request["special_tokens"], request["shapes"], now):
        print(json.dumps(rendering), flush=True)


if __name__ == "__main__":
    _limit(int(sys.argv[1]))
    _answer(json.load(sys.stdin))
