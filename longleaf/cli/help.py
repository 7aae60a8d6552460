"""Layout of the help pages: options under headings, and names of values instead of Python types."""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

MAX_COLUMNS = 120
MAX_NAME = 28
"""Width of the column of names."""
OPTIONS = "Options"
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}
"""Names of option values by their types. A flag has no value."""


class CommandGroup(typer.Typer):
    """Commands whose help pages have the layout of this module."""

    def __init__(self, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_COLUMNS}
        super().__init__(
            cls=HelpGroup, context_settings=context, rich_markup_mode=None, no_args_is_help=True, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return super().command(name, cls=HelpCommand, **settings)


class HelpCommand(TyperCommand):
    """A command."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for param in self.params:
            if isinstance(param, TyperArgument) and param.metavar is None:
                param.metavar = str(param.name).upper()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_usage(param) for param in self.params if isinstance(param, TyperArgument))]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        write_help_text(self.help or "", formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        write_help_text(self.help or "", formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands with the first paragraph of their help."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, first_paragraph(command.help or "")) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            write_rows(rows, formatter)


def write_help_text(text: str, formatter: Any) -> None:
    """Writes paragraphs. Indented ones, such as examples, keep their lines; all others are wrapped."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.split("\n") if paragraph.startswith(" ") else wrapped(paragraph, formatter.width - 2)
        formatter.write("\n" + "".join(f"  {line}\n" for line in lines))


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns. Words with hyphens, such as options, are not split."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def write_rows(rows: Sequence[tuple[str, str]], formatter: Any) -> None:
    """Writes names with their descriptions in a second column. A long name has its own line."""
    column = min(max(len(name) for name, _ in rows), MAX_NAME) + 4
    for name, description in rows:
        lines = wrapped(description, formatter.width - column)
        first = lines.pop(0) if len(name) + 4 <= column and lines else ""
        formatter.write(f"  {name}".ljust(column if first else 0) + f"{first}\n")
        formatter.write("".join(f"{'':{column}}{line}\n" for line in lines))


def first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def write_parameters(params: Sequence[Any], ctx: Any, formatter: Any) -> None:
    """Writes arguments and options, each under its heading, in the order of the headings' first options."""
    sections = dict[str, list[tuple[str, str]]]()
    for param in params:
        if isinstance(param, TyperArgument):
            sections.setdefault("Arguments", []).append((str(param.metavar), _description(param, ctx)))
    for param in params:
        if isinstance(param, TyperOption) and not param.hidden:
            heading = param.rich_help_panel or OPTIONS
            sections.setdefault(heading, []).append((_option(param, ctx), _description(param, ctx)))
    for heading, rows in sections.items():
        with formatter.section(heading):
            write_rows(rows, formatter)


def _usage(argument: TyperArgument) -> str:
    name = str(argument.metavar)
    return name if argument.required else f"[{name}]"


def _option(option: TyperOption, ctx: Any) -> str:
    """The names of an option, and the name of its value."""
    metavar = _metavar(option, ctx) if option.metavar is None else option.metavar
    names = ", ".join([*sorted(option.opts, key=len), *option.secondary_opts])
    return f"{names} {metavar}".rstrip()


def _metavar(option: TyperOption, ctx: Any) -> str:
    kind = option.type_descriptor
    if kind.is_choice:
        return option.display_type(ctx).strip("<>")
    annotation: Any = kind.annotation
    if getattr(annotation, "__origin__", None) is list:
        (annotation,) = annotation.__args__
    return METAVARS[annotation]


def _description(param: TyperArgument | TyperOption, ctx: Any) -> str:
    default = _default(param, ctx)
    extra = "[required]" if param.required else f"[default: {default}]" if default else ""
    return f"{param.help or ''} {extra}".strip()


def _default(param: Any, ctx: Any) -> str:
    """Describes the default; empty if it is none, or not shown."""
    if isinstance(param.show_default, str):
        return param.show_default
    value = param.get_default(ctx, call=False)
    if not param.show_default or value is None or value is False or value == "":
        return ""
    if value is True:
        return str(param.opts[0]).removeprefix("--")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
