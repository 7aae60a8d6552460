"""`longleaf chat` in a pseudo-terminal and through pipes, against a real service."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from longleaf.cli.provenance_output import CONTROLS
from longleaf.client import Client
from longleaf.types import Delta, Finished, Message
from tests.support.command_line import CLI, NAME, Served
from tests.support.pty_terminal import CTRL_C, CTRL_D, TAB, UP, PtyTerminal

TEXT = "The lighthouse keeper wrote: ümläute, 日本語, and 🌲 trees.\n" * 20


@pytest.fixture
def book(served: Served, tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "book.txt"
    file.write_text(TEXT, encoding="utf-8")
    served.json("ingest", str(file), "--name", "book")
    yield "book"
    served.run("contexts", "delete", "book")


def chat(served: Served, tmp_path: Path, *options: str) -> PtyTerminal:
    command = [*CLI, "chat", *options, "--server", served.address]
    return PtyTerminal(command, {"XDG_STATE_HOME": str(tmp_path / "state")})


def answers(served: Served, *turns: str, context: str | None = None, max_tokens: int) -> list[str]:
    """The greedy answers of a conversation."""
    found, messages = list[str](), list[Message]()
    with Client(served.address) as client:
        for turn in turns:
            messages.append(Message("user", turn))
            events = list(client.chat(messages, context=context, max_tokens=max_tokens))
            found.append("".join(event.text for event in events if isinstance(event, Delta)))
            messages.append(Message("assistant", found[-1]))
    return found


def test_each_line_of_a_pipe_continues_the_conversation(served: Served, book: str) -> None:
    expected = answers(served, "Which author wrote?", "And the date?", context=book, max_tokens=12)
    found = served.run("chat", book, "--max-tokens", "12", stdin="Which author wrote?\n\nAnd the date?\n")
    assert found.returncode == 0
    assert found.stdout == "".join(f"{answer}\n" for answer in expected).replace("\r", "\n")  # as text from a pipe
    note = "note: the answer was cut off after 12 tokens (--max-tokens)"
    assert found.stderr.splitlines() == [note, note]
    assert answers(served, "And the date?", context=book, max_tokens=12) != expected[1:]


def test_json_of_a_pipe_has_the_events_of_every_answer(served: Served) -> None:
    found = served.run("chat", "--max-tokens", "3", "--json", stdin="Who?\nWhat?\n")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    ends = [line for line in lines if "finish_reason" in line]
    assert [end["usage"]["completion_tokens"] for end in ends] == [3, 3]
    assert (found.returncode, found.stderr) == (0, "")


def test_unknown_context_ends_the_command(served: Served) -> None:
    found = served.run("chat", "none", stdin="Who?\n")
    error = "error: there is no context named none; `longleaf contexts list` lists all contexts\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", error)


def test_plain_conversation_reuses_its_keys(served: Served) -> None:
    """The service holds the keys of earlier prompts."""
    turns = ["Which author wrote the long letter about the sea? " * 20, "And the date?", "And when?"]
    found = served.run("chat", "--max-tokens", "8", "--json", stdin="\n".join(turns))
    ends = [json.loads(line) for line in found.stdout.splitlines() if "finish_reason" in line]
    usages = [end["usage"] for end in ends]
    assert usages[1]["cached_tokens"] >= usages[0]["prompt_tokens"] - 1
    assert usages[2]["cached_tokens"] >= usages[0]["prompt_tokens"] - 1


def test_conversation_about_a_context_reuses_its_keys(served: Served, book: str) -> None:
    turns = ["Which author wrote the long letter about the sea? " * 5, "And the date?", "And when?"]
    found = served.run("chat", book, "--max-tokens", "20", "--json", stdin="\n".join(turns))
    ends = [json.loads(line) for line in found.stdout.splitlines() if "finish_reason" in line]
    usages = [end["usage"] for end in ends]
    for before, after in pairwise(usages):
        assert after["cached_tokens"] >= before["prompt_tokens"] - 1


def test_interrupt_stops_the_answer_and_not_the_chat(served: Served, tmp_path: Path) -> None:
    [answer] = answers(served, "Who?", max_tokens=2000)
    with chat(served, tmp_path) as terminal:
        terminal.expect(f"{NAME}: /help lists the commands, Ctrl-D ends the chat")
        terminal.expect("> ")
        terminal.type("Who?\n")
        terminal.expect(answer[:4])
        terminal.type(CTRL_C)
        terminal.expect("[stopped]")
        terminal.expect("> ")
        terminal.type("half a line" + CTRL_C)
        terminal.expect("(Ctrl-D ends the chat)")
        terminal.expect("> ")
        terminal.type(f"/save {tmp_path}/saved.json\n")
        terminal.expect("[saved as ")
        terminal.expect("> ")  # earlier, the terminal would take the key before the editor does
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    saved = json.loads((tmp_path / "saved.json").read_text())
    [question, stopped] = saved["messages"]
    assert (saved["model"], question) == (NAME, {"role": "user", "content": "Who?"})
    assert stopped["role"] == "assistant"
    assert stopped["content"]
    assert answer.startswith(stopped["content"][:4])


def test_commands_change_the_conversation(served: Served, book: str, tmp_path: Path) -> None:
    first, second = answers(served, "Which author wrote?", "And the date?", context=book, max_tokens=12)
    [alone] = answers(served, "Which author wrote?", max_tokens=12)
    with chat(served, tmp_path, "--max-tokens", "12") as terminal:
        terminal.expect("> ")
        terminal.type("/help\n")
        terminal.expect("/sources [N|on|off]")
        terminal.type("/sources\n")
        terminal.expect("error: /sources: needs a context: /context NAME opens one")
        terminal.type("/context\n")
        terminal.expect("  book  ")
        terminal.type("/context none-such\n")
        terminal.expect("error: there is no context named none-such")
        terminal.type("/context book\n")
        terminal.expect("[a new conversation about book]")
        terminal.type("Which author wrote?\n")
        terminal.expect(shown(first))
        terminal.expect("[the answer was cut off after 12 tokens (--max-tokens); ask for the rest]")
        terminal.type("And the date?\n")
        terminal.expect(shown(second))
        terminal.expect("; ask for the rest]")
        terminal.type("/sources 2\n")
        terminal.expect("[attention: ")
        terminal.type("/context none\n")
        terminal.expect("[a new conversation]")
        terminal.type("/system Be brief.\n")
        terminal.expect("[applies from the next question on]")
        terminal.type("/system\n")
        terminal.expect("\nBe brief.\n")
        terminal.type("/system none\n")
        terminal.expect("[applies")
        terminal.type("Which author wrote?\n")
        terminal.expect(shown(alone))
        terminal.type("/reset\n")
        terminal.expect("[a new conversation]")
        terminal.type(f"/save {tmp_path}/saved.json\n")
        terminal.expect("[saved as ")
        terminal.type("/unknown\n")
        terminal.expect("error: /unknown: is not a command")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert json.loads((tmp_path / "saved.json").read_text()) == {"model": NAME, "messages": []}


def shown(answer: str) -> str:
    """The first line of an answer, as the terminal shows it: without control characters."""
    return next(line for line in answer.translate(CONTROLS).split("\n") if line.strip()).strip()


def test_lines_are_edited_completed_continued_and_remembered(served: Served, tmp_path: Path) -> None:
    with chat(served, tmp_path, "--max-tokens", "2") as terminal:
        terminal.expect("> ")
        terminal.type("/sys" + TAB + "first\x1b[D\x7fS\n")  # left, and erase: "firSt"
        terminal.expect("[applies")
        terminal.type("/system\n")
        terminal.expect("\nfirSt\n")
        terminal.type("/system one\\\ntwo\n")
        terminal.expect("[applies")
        terminal.type("/system\n")
        terminal.expect("\none\ntwo\n")
        terminal.expect("> ")  # earlier, the terminal would take the key before the editor does
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    history = tmp_path / "state" / "longleaf" / "chat_history"
    assert history.read_text().splitlines() == ["/system firSt", "/system", "/system one two", "/system"]
    assert history.stat().st_mode & 0o777 == 0o600
    with chat(served, tmp_path) as terminal:
        terminal.expect("> ")
        terminal.type(UP * 4 + "\n")
        terminal.expect("[applies")
        terminal.type("/system\n")
        terminal.expect("\nfirSt\n")
        terminal.expect("> ")  # earlier, the terminal would take the key before the editor does
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    with chat(served, tmp_path, "--no-history") as terminal:
        terminal.expect("> ")
        terminal.type("/system secret\n")
        terminal.expect("[applies")
        terminal.expect("> ")  # earlier, the terminal would take the key before the editor does
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert "secret" not in history.read_text()


def test_sources_are_those_of_ask(served: Served, book: str, tmp_path: Path) -> None:
    options = ("--max-tokens", "6", "--sources", "--source-count", "3")
    expected = served.run("ask", book, "Which author wrote?", *options).stdout
    places = [line for line in expected.splitlines() if line.startswith("book.txt:") or "book.txt:" in line[:200]]
    assert places
    with chat(served, tmp_path, book, "--max-tokens", "6") as terminal:
        terminal.expect("> ")
        terminal.type("Which author wrote?\n")
        terminal.expect("; ask for the rest]")
        terminal.type("/sources 3\n")
        listed = terminal.expect("[attention: ")
    assert [line.strip() for line in listed.splitlines() if "book.txt:" in line] == [line.strip() for line in places]


def test_sources_are_shown_after_each_answer_and_explained_once(served: Served, book: str, tmp_path: Path) -> None:
    options = ("--max-tokens", "6", "--sources", "--source-count", "5")
    expected = served.run("ask", book, "Which author wrote?", *options).stdout
    [first] = [line for line in expected.splitlines() if line.startswith("[1] ")]
    with chat(served, tmp_path, book, "--max-tokens", "6") as terminal:
        terminal.expect("> ")
        terminal.type("/sources on\n")
        terminal.expect("[applies from the next question on]")
        terminal.type("Which author wrote?\n")
        listed = terminal.expect("[percent: share of attention")
        terminal.type("/reset\n")
        terminal.expect("[a new conversation]")
        terminal.type("Which author wrote?\n")
        again = terminal.expect("[attention: ")
        terminal.type("/sources\n")
        again += terminal.expect("[attention: ")
        terminal.type("/sources off\n")
        again += terminal.expect("[applies from the next question on]")
        terminal.type("/reset\n")
        terminal.expect("[a new conversation]")
        terminal.type("Which author wrote?\n")
        terminal.expect("; ask for the rest]")
        terminal.type("/sources never\n")
        without = terminal.expect("error: /sources: never is not a number, on or off")
    assert first.strip() in listed
    assert again.count(first.strip()) == 2
    assert "[percent" not in again
    assert "[1]" not in without


def test_answers_of_chat_and_ask_are_equal(served: Served, book: str) -> None:
    expected = served.run("ask", book, "Which author wrote?", "--max-tokens", "9").stdout
    assert served.run("chat", book, "--max-tokens", "9", stdin="Which author wrote?\n").stdout == expected


def test_a_chat_without_a_limit_uses_the_capacity(served: Served) -> None:
    with Client(served.address) as client:
        *_, end = client.chat([Message("user", "Who?")], until_full=True)
    assert isinstance(end, Finished)
    found = served.run("chat", stdin="Who?\n")
    assert ("cut off" in found.stderr) == (end.reason == "length")
    assert "(no capacity is left)" in found.stderr or end.reason != "length"
