"""Chat templates, rendered as transformers does: sandboxed Jinja with the same filters, globals and tags.

`python -m coordinator.text.template SECONDS` reads requests from standard input, one JSON object per line, and answers
each with a line; renderer.py starts it.
"""

import json
import resource
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters that a template may add to the messages."""
MAX_MEMORY = 1 << 30
"""Address space limit of the rendering process in bytes."""
MAX_REASON = 500
"""Maximum characters of a template's error message."""
Messages = Sequence[dict[str, Any]]
"""A conversation: `role` and `content` of each message, a text or a list of one part: `type` ("text") and `text`; also
`tool_calls`, `tool_call_id`, `name` and the reasoning, in transformers' form."""
_Show = Callable[..., str]
"""Renders `messages`."""


class Rendering(NamedTuple):
    """The prompt of a conversation."""

    text: str = ""
    """The prompt up to the model's answer."""
    reason: str = ""
    """Why there is no prompt, as in `cannot be rendered: roles must alternate`; empty if there is one."""
    message: int | None = None
    """Index of the message that causes the error, if known."""


class DirectRenderer:
    """Renders in this process, without limits on time and memory; see renderer.Renderer."""

    def __init__(self, now: datetime | None = None) -> None:
        """`now` is the current time as templates see it."""
        self._now = now or datetime.now()

    def literals(self, source: str) -> list[str]:
        """The literal texts and string constants of a template; none if it cannot be parsed."""
        try:
            tree = _environment(self._now).parse(source)
        except Exception:  # template errors are reported when it is rendered
            return []
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        constants: list[object] = [node.value for node in tree.find_all(nodes.Const)]
        return texts + [each for each in constants if isinstance(each, str)]

    def render(self, source: str, variables: dict[str, Any], conversations: Sequence[Messages]) -> list[Rendering]:
        """The prompt of each conversation. `variables` are further names for the template, such as `bos_token` and
        `enable_thinking`."""
        try:
            template = _compiled(source, self._now)
        except Exception as error:
            return [Rendering(reason=_describe(error))] * len(conversations)
        fixed: dict[str, Any] = {"documents": None, "add_generation_prompt": True}
        show = partial(template.render, **{"tools": None, **variables, **fixed})
        room = MAX_CHARACTERS + num_characters(variables.get("tools"))
        return [_render(show, messages, room) for messages in conversations]


def _render(show: _Show, messages: Messages, room: int) -> Rendering:
    try:
        text = show(messages=messages)
        text.encode()  # lone surrogates are not text
    except Exception as error:  # templates are programs and may raise any exception
        return Rendering(reason=_describe(error), message=_refused(show, messages))
    if len(text) > room + num_characters(messages):
        return Rendering(
            reason=f"produces {len(text):,} characters, over {MAX_CHARACTERS:,} more than the messages have"
        )
    return Rendering(text)


def num_characters(value: object) -> int:
    """The characters of all strings of a JSON value."""
    match value:
        case str():
            return len(value)
        case dict():
            members = cast(dict[str, object], value)
            return sum(map(len, members)) + sum(map(num_characters, members.values()))
        case list() | tuple():
            return sum(map(num_characters, cast(Sequence[object], value)))
        case _:
            return 0


def _describe(error: Exception) -> str:
    return f"cannot be rendered: {str(error) or type(error).__name__}"[:MAX_REASON]


def _refused(show: _Show, messages: Messages) -> int:
    """The first message at which rendering fails: templates process messages in order."""
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


class _Generation(Extension):
    """`{% generation %}` marks output of the model, for training. Its content is rendered in a separate scope."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Macro) -> str:
        return caller()


@lru_cache(maxsize=1)
def _compiled(source: str, now: datetime) -> Any:
    return _environment(now).from_string(source)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, loopcontrols]
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


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def _limit_time(seconds: int) -> None:
    """Limits the further processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def _answer(request: dict[str, Any]) -> object:
    renderer = DirectRenderer(datetime.fromisoformat(request["now"]))
    if request["conversations"] is None:
        return renderer.literals(request["source"])
    return renderer.render(request["source"], request["variables"], request["conversations"])


def _main(seconds: int) -> None:
    _limit_memory()
    for line in sys.stdin:
        _limit_time(seconds)
        try:
            answer = json.dumps(_answer(json.loads(line)))
        except MemoryError:
            answer = json.dumps(None)
        print(answer, flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
