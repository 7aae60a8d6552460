"""`longleaf demo`."""

import re
import signal
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longleaf.citation import joined
from longleaf.cli.ingest import progress_bar
from longleaf.cli.model_option import MODEL_HELP, Yes, resolve
from longleaf.cli.options import AsJson, print_json
from longleaf.cli.provenance_output import CONTROLS, Excerpt, excerpt
from longleaf.config import Launcher
from longleaf.demo.haystack import DEFAULT_TOKENS
from longleaf.extras import require_extra
from longleaf.formatting import human_bytes
from longleaf.types import IngestProgress, Source

if TYPE_CHECKING:
    from longleaf.client import Client
    from longleaf.client.callbacks import OnProgress
    from longleaf.demo.run import Question, Report

INDENT = "    "


def demo(
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Length of the document in tokens of the packaged model, which are bytes.",
            show_default=f"{DEFAULT_TOKENS:,}, or the whole --file",
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks (worker processes).")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the document and the facts.")] = 0,
    file: Annotated[
        Path | None, typer.Option(help="Text file to plant the facts in.", show_default="a generated text")
    ] = None,
    launcher: Annotated[Launcher, typer.Option(help="How ranks are started.")] = "ray",
    model: Annotated[
        str | None, typer.Option(help=MODEL_HELP, show_default="the packaged model", metavar="MODEL")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Run a demonstration on this machine.

    The demo starts a service, ingests a long document with planted facts, asks for the facts, checks the answers, and
    asks one question again after a restart. The exit code is 0 if at least 80 % of the answers are right and the answer
    after the restart is the same.

    Example: longleaf demo --tokens 32000 --world-size 2
    """
    from longleaf.demo.run import DemoSettings, run

    require_extra("server", "longleaf demo")
    folder = None if model is None else resolve(model, yes=yes, is_quiet=as_json).folder
    settings = DemoSettings(model=folder, world_size=world_size, launcher=launcher, tokens=tokens, seed=seed, file=file)
    with _terminable():
        if as_json:
            report = run(settings, _Silent())
            print_json(report)
        else:
            with _Screen() as screen:
                report = run(settings, screen)
            _print_report(report)
    raise typer.Exit(0 if report.has_passed else 1)


@contextmanager
def _terminable() -> Generator[None, None, None]:
    """SIGTERM and SIGHUP raise SystemExit in the body, so that the service is stopped."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Silent:
    """Shows nothing, for --json."""

    def show_message(self, line: str) -> None: ...

    def show_ingest(self, progress: IngestProgress) -> None: ...

    def show_question(self, question: str) -> None: ...

    def show_answer(self, text: str) -> None: ...

    def show_verdict(self, question: "Question") -> None: ...

    def show_sources(self, client: "Client", sources: Sequence[Source]) -> None: ...


class _Screen:
    """Shows the progress in the terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._stack = ExitStack()
        self._bar: OnProgress | None = None

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def show_message(self, line: str) -> None:
        self._console.print(line, markup=False)

    def show_ingest(self, progress: IngestProgress) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(progress_bar(None))
        self._bar(progress)
        if progress.phase == "ready":
            self._stack.close()

    def show_question(self, question: str) -> None:
        self._console.print(f"\n[bold]?[/bold] {question}")
        self._console.print("  ", end="")

    def show_answer(self, text: str) -> None:
        self._console.print(text, end="", markup=False)

    def show_verdict(self, question: "Question") -> None:
        verdict = "[green]right[/green]" if question.correct else f"[red]wrong, expected {question.expected}[/red]"
        self._console.print(f"   {verdict}")

    def show_sources(self, client: "Client", sources: Sequence[Source]) -> None:
        from longleaf.demo.run import CONTEXT

        for source in joined(sources)[:1]:
            found = excerpt(client, CONTEXT, source, client.get_context(CONTEXT).tokens)
            if found is None:
                continue
            for line in _source_text(source, found).wrap(self._console, self._console.width - len(INDENT)):
                line.rstrip()
                self._console.print(INDENT, line, sep="")


def _source_text(source: Source, found: Excerpt) -> Text:
    """The line number, the share and the text of a source, on one line."""
    place = "" if found.own.line is None else f" on line {found.own.line:,}"
    text = Text.assemble((f"{source.share:.1%} of the attention{place}: ", "cyan"), ("…", "dim"))
    for part, style in found.parts:
        flat = re.sub(r"\s+", " ", part).translate(CONTROLS)
        text.append(flat.lstrip() if text.plain.endswith(" ") else flat, style)
    return text.append("…", "dim")


def _print_report(report: "Report") -> None:
    console = Console(highlight=False)
    table = Table("rank", "node", "pid", "tokens", "keys and values", title="Placement of the keys")
    for rank in report.ranks:
        table.add_row(str(rank.rank), rank.node, str(rank.pid), f"{rank.tokens:,}", human_bytes(rank.kv_bytes))
    console.print()
    console.print(table)
    questions = [*report.questions, *([] if report.restart is None else [report.restart.question])]
    right = sum(question.correct for question in questions)
    console.print(f"{right} of {len(questions)} answers right")
    console.print(f"time to the first token  {report.ttft_s:8.2f} s (median)")
    console.print(f"answering                {report.decode_tokens_per_s:8,.1f} tokens/s")
    console.print(f"ingesting                {report.ingest_tokens_per_s:8,.1f} tokens/s")
    if (restart := report.restart) is not None:
        console.print(f"starting again           {restart.start_s:8.2f} s")
        console.print(f"time to the first token  {restart.first_token_s:8.2f} s after that, with the document reloaded")
