"""`longleaf chat`: a conversation in the terminal."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import typer

from longleaf.cli.chat_session import ChatSession, Turn
from longleaf.cli.error_output import describe
from longleaf.cli.flags import ANSWER, ClientId, SamplingFlags, takes_flags, takes_server
from longleaf.cli.generate import footnote, print_events, with_notes
from longleaf.cli.line_editor import LineEditor, default_history
from longleaf.cli.options import AsJson, ServerOptions, connect, exactness_line, option
from longleaf.cli.provenance_output import CONTROLS, SourceList
from longleaf.errors import InvalidArgument, LongleafError, Unavailable
from longleaf.formatting import human_count
from longleaf.types import Cluster, Context, Delta, Event, GenerateOptions, Progress, Started

if TYPE_CHECKING:
    from longleaf.client import Client

PROMPT, CONTINUATION = "> ", ". "
ERASE_LINE = "\r\x1b[K"
NUM_SOURCES = 5
NONE = "none"
"""Argument of commands that removes the context or the system message."""
SWITCH = {"on": True, "off": False}
MAX_DIGITS = 10
"""Digits of a number that a command takes."""


@dataclass(frozen=True, kw_only=True)
class ChatFlags(SamplingFlags):
    """The parsed options."""

    max_tokens: Annotated[
        int | None, option(ANSWER, "Maximum number of tokens of each answer.", default="the available capacity")
    ] = None
    system: Annotated[str, option(ANSWER, "System message of the conversation.")] = ""
    verbose: Annotated[bool, option(ANSWER, "Print the length and the times of each answer.", "--verbose")] = False
    no_history: Annotated[
        bool, option(ANSWER, "Do not save the questions for the arrow keys of later chats.", "--no-history")
    ] = False
    client: ClientId = ""

    def options(self) -> GenerateOptions:
        """Options for the client."""
        others = ("system", "verbose", "no_history")
        given = {name: value for name, value in asdict(self).items() if name not in others}
        return cast(GenerateOptions, given | {"until_full": self.max_tokens is None})


@takes_flags(ChatFlags)
@takes_server
def chat(
    server: ServerOptions,
    flags: ChatFlags,
    context: Annotated[str | None, typer.Argument(help="Name of the context; without it, only the model.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold a conversation, with or without a context.

    Each question is sent with the conversation before it. /help lists the commands. Ctrl-C stops an answer, and Ctrl-D
    ends the chat. A line that ends with \\ continues on the next one.

    If standard input is not a terminal, each line is a question, only answers are printed to standard output, and the
    first error ends the command. With --json, answers are printed as by `longleaf ask --json`.

    Examples:

      longleaf chat
      longleaf chat book --system "Answer in one sentence."
      printf 'Who is the captain?\\nAnd the first mate?\\n' | longleaf chat book
    """
    with connect(server) as client:
        session = ChatSession(client, flags.options(), context=context, system=flags.system)
        found = client.get_context(context) if context is not None else None
        if not sys.stdin.isatty():
            answer_lines(session, sys.stdin, PipeOutput(as_json))
            return
        output = PipeOutput(as_json) if as_json else TerminalOutput(flags.verbose)
        terminal = ChatTerminal(client, session, output)
        history = None if flags.no_history else default_history()
        print(describe_start(client.cluster(), found), file=sys.stderr)
        terminal.run(LineEditor(history, terminal.completions))


def describe_start(cluster: Cluster, context: Context | None) -> str:
    """The model, the context, and how to get help."""
    about = f" about {context.id} ({human_count(context.tokens, 'token')})" if context is not None else ""
    return f"{cluster.model.name}{about}: /help lists the commands, Ctrl-D ends the chat"


def answer_lines(session: ChatSession, lines: Iterable[str], output: "PipeOutput") -> None:
    """Answers every line that is not empty. Raises LongleafError."""
    for line in lines:
        if question := line.strip():
            answer(session, question, output)


def answer(session: ChatSession, question: str, output: "PipeOutput | TerminalOutput") -> Turn:
    """Asks a question, prints the answer, and adds both to the conversation, unless it fails. An interrupt stops the
    answer; the part that has arrived stays in the conversation. Raises LongleafError and KeyboardInterrupt."""
    try:
        return _ask(session, question, output)
    except InvalidArgument as error:
        if not session.refuses_conversation(error):
            raise
        print(
            f"note: {error.description}; questions of this conversation are sent without earlier ones", file=sys.stderr
        )
        with session.asking_singly():
            return _ask(session, question, output)


def _ask(session: ChatSession, question: str, output: "PipeOutput | TerminalOutput") -> Turn:
    turn = session.begin(question)
    try:
        _print_answer(session, turn, output)
    except KeyboardInterrupt:
        session.keep(turn)
        raise
    session.keep(turn)
    return turn


def _print_answer(session: ChatSession, turn: Turn, output: "PipeOutput | TerminalOutput") -> None:
    events = session.ask(turn)
    with closing(events):
        output.print_answer(with_notes(events))
    if turn.finished is None:
        raise Unavailable("the answer ended before its last event")
    output.print_end(turn)


def describe_cut(turn: Turn) -> str | None:
    """The reason why an answer is incomplete; None if it is complete."""
    if turn.finished is None or turn.finished.reason != "length":
        return None
    limit = "no capacity is left" if turn.options.get("until_full") else "--max-tokens"
    return f"the answer was cut off after {human_count(turn.num_tokens, 'token')} ({limit})"


class PipeOutput:
    """Prints only answers to standard output, as text or JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def print_answer(self, events: Iterable[Event]) -> None:
        if self._as_json:
            print_events(events, 1)
            return
        is_terminal = sys.stdout.isatty()
        for event in events:
            if isinstance(event, Delta):
                print(event.text.translate(CONTROLS) if is_terminal else event.text, end="", flush=True)
        print(flush=True)

    def print_end(self, turn: Turn) -> None:
        if not self._as_json and (cut := describe_cut(turn)) is not None:
            print(f"note: {cut}", file=sys.stderr)


class TerminalOutput:
    """Prints answers for a reader: with the progress before the first token, and without control characters."""

    def __init__(self, is_verbose: bool) -> None:
        self._is_verbose = is_verbose

    def print_answer(self, events: Iterable[Event]) -> None:
        is_waiting = False
        try:
            for event in events:
                match event:
                    case Started(queue_position=place) if place:
                        print(f"{ERASE_LINE}queued, position {place:,} …", end="", flush=True)
                        is_waiting = True
                    case Progress(processed, total) if processed < total:
                        print(f"{ERASE_LINE}reading {processed:,} of {total:,} tokens …", end="", flush=True)
                        is_waiting = True
                    case Delta():
                        print(ERASE_LINE if is_waiting else "", end="")
                        is_waiting = False
                        print(event.text.translate(CONTROLS), end="", flush=True)
                    case _:
                        pass
        finally:
            print(ERASE_LINE if is_waiting else "", flush=True)

    def print_end(self, turn: Turn) -> None:
        assert turn.finished is not None
        if self._is_verbose:
            print(footnote(turn.finished))
            return
        if (cut := describe_cut(turn)) is not None:
            print(f"[{cut}; ask for the rest]")
        if not turn.finished.is_exact:
            print(f"[{exactness_line(turn.finished)}]")


@dataclass(frozen=True)
class ChatCommand:
    """A command of the chat."""

    usage: str
    help: str
    run: Callable[[str], None]

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


class ChatTerminal:
    """Reads questions and commands until the end of the input. Errors are printed, and the chat continues."""

    def __init__(self, client: "Client", session: ChatSession, output: PipeOutput | TerminalOutput) -> None:
        self._client = client
        self._session = session
        self._output = output
        self._source_list = SourceList(client)
        self._is_over = False
        commands = (
            ChatCommand("/help", "list the commands", self._help),
            ChatCommand(
                f"/context [NAME|{NONE}]",
                "show all contexts, or begin a new conversation about one, or without one",
                self._context,
            ),
            ChatCommand(f"/system [TEXT|{NONE}]", "show, set or remove the system message", self._system),
            ChatCommand(
                "/sources [N|on|off]",
                f"show N sources of the last answer (default {NUM_SOURCES}), which is generated again if they were not "
                "measured; or show them after each answer",
                self._sources,
            ),
            ChatCommand("/reset", "begin a new conversation", self._reset),
            ChatCommand("/save FILE", "save the conversation as JSON, in the form of an OpenAI request", self._save),
            ChatCommand("/exit", "end the chat, as Ctrl-D", self._exit),
        )
        self._commands = {command.name: command for command in commands}

    def run(self, editor: LineEditor) -> None:
        """Runs the chat."""
        while not self._is_over:
            try:
                message = editor.read(PROMPT, CONTINUATION)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends the chat)", file=sys.stderr)
                continue
            try:
                self._handle(message)
            except KeyboardInterrupt:
                print("[stopped]", file=sys.stderr)
            except LongleafError as error:
                print(f"error: {describe(error)}", file=sys.stderr)

    def completions(self, line: str) -> Sequence[str]:
        """The commands that begin with `line`."""
        return [f"{name} " for name in self._commands if name.startswith(line)]

    def _handle(self, message: str) -> None:
        """Raises LongleafError."""
        text = message.strip()
        if not text:
            return
        if not message.startswith("/"):
            turn = answer(self._session, text, self._output)
            if isinstance(self._output, TerminalOutput):  # JSON has them in the last event
                self._print_sources(turn)
            return
        name, _, argument = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            rule = "/help lists the commands; a space before / makes it a question"
            raise InvalidArgument(name, f"is not a command: {rule}")
        command.run(argument.strip())

    def _help(self, _: str) -> None:
        width = max(len(command.usage) for command in self._commands.values())
        for command in self._commands.values():
            print(f"{command.usage:{width}}  {command.help}")
        print("Ctrl-C stops an answer. A line that ends with \\ continues on the next one.")

    def _context(self, name: str) -> None:
        if not name:
            contexts = self._client.list_contexts()
            for context in contexts:
                mark = "*" if context.id == self._session.context else " "
                print(f"{mark} {context.id}  {human_count(context.tokens, 'token')}")
            if not contexts:
                print("no contexts")
            return
        self._session.open(None if name == NONE else name)
        print(f"[a new conversation{'' if name == NONE else f' about {name}'}]")

    def _system(self, text: str) -> None:
        if not text:
            print(self._session.system or "no system message")
            return
        self._session.instruct("" if text == NONE else text)
        print("[applies from the next question on]")

    def _sources(self, argument: str) -> None:
        session = self._session
        if argument in SWITCH:
            session.request_sources(NUM_SOURCES if SWITCH[argument] else None)
            print("[applies from the next question on]")
            return
        if session.context is None:
            raise InvalidArgument("/sources", "needs a context: /context NAME opens one")
        if not session.turns:
            raise InvalidArgument("/sources", "needs an answer: ask a question first")
        if argument and not (argument.isdecimal() and len(argument) < MAX_DIGITS):
            raise InvalidArgument("/sources", f"{argument} is not a number, on or off")
        turn = session.turns[-1]
        if not argument and turn.finished is not None and turn.finished.attribution is not None:
            self._print_sources(turn)
            return
        again = session.trace(turn, int(argument) if argument else NUM_SOURCES)
        if again.text != turn.text:
            print(f"note: the repetition differs, and these are its sources: {again.text.translate(CONTROLS)}")
        self._print_sources(again)

    def _print_sources(self, turn: Turn) -> None:
        if self._session.context is not None and turn.finished is not None:
            self._source_list.print(self._session.context, turn.finished)

    def _reset(self, _: str) -> None:
        self._session.reset()
        print("[a new conversation]")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidArgument("/save", "needs a file name")
        model = self._client.cluster().model.name
        context = self._session.context
        messages = [{"role": each.role, "content": each.text} for each in self._session.messages()]
        saved = {"model": model if context is None else f"{model}:{context}", "messages": messages}
        path = Path(name)
        try:
            path = path.expanduser()
            with path.open("x", encoding="utf-8") as file:
                file.write(msgspec.json.format(msgspec.json.encode(saved)).decode() + "\n")
        except (OSError, RuntimeError, ValueError) as error:  # the latter for unknown users and odd names
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidArgument("/save", f"{path}: {reason}") from None
        print(f"[saved as {path}]")

    def _exit(self, _: str) -> None:
        self._is_over = True
