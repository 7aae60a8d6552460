"""A conversation with a service: its messages, its context and its options."""

import re
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from longleaf.errors import InvalidArgument, LongleafError
from longleaf.types import Delta, Event, Finished, GenerateOptions, Message, Provenance

if TYPE_CHECKING:
    from longleaf.client import Client

_OF_A_MESSAGE = re.compile(r"conversation\.messages\[\d+\]")
MAX_SEED = 1 << 63


class Turn:
    """A question and its answer, as far as it has arrived."""

    def __init__(self, question: str, messages: Sequence[Message], options: GenerateOptions) -> None:
        self.question = question
        self.messages = tuple(messages)
        """The request: the earlier messages, and the question."""
        self.options = options
        self.text = ""
        self.num_tokens = 0
        self.finished: Finished | None = None

    def receive(self, events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """The events, after adding them to the answer."""
        try:
            for event in events:
                match event:
                    case Delta():
                        self.text += event.text
                        self.num_tokens += len(event.token_ids)
                    case Finished():
                        self.finished = event
                    case _:
                        pass
                yield event
        finally:
            events.close()


class ChatSession:
    """Sends each question with the conversation before it. The service reuses the keys of its beginning."""

    def __init__(self, client: "Client", options: GenerateOptions, *, context: str | None, system: str) -> None:
        self._client = client
        self._options = options
        self.context = context
        self.system = system
        self.turns = list[Turn]()
        """The answered questions, including stopped answers with text."""
        self.is_single = False
        """The model answers single questions only: earlier turns are not sent."""
        self.num_sources: int | None = None
        """Number of spans of the context that are requested as sources of each answer."""

    def messages(self) -> list[Message]:
        """The system message, and all turns."""
        return self._messages(self.turns)

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        found = [Message("system", self.system)] if self.system else []
        for turn in turns:
            found += [Message("user", turn.question), Message("assistant", turn.text)]
        return found

    def begin(self, question: str) -> Turn:
        """A turn without an answer."""
        before = self._messages([] if self.is_single else self.turns)
        seed = self._options.get("seed")
        seed = secrets.randbelow(MAX_SEED) if seed is None else seed
        options = self._options | {"seed": seed}
        if self.context is not None and self.num_sources is not None:
            options["provenance"] = Provenance(num_spans=self.num_sources)
        return Turn(question, [*before, Message("user", question)], options)

    def ask(self, turn: Turn) -> Generator[Event, None, None]:
        """Streams the answer. Raises the errors of `Client.chat`."""
        return turn.receive(self._client.chat(turn.messages, context=self.context, **turn.options))

    def keep(self, turn: Turn) -> None:
        """Adds the turn to the conversation if its answer has text."""
        if turn.text:
            self.turns.append(turn)

    def refuses_conversation(self, error: InvalidArgument) -> bool:
        """Whether the error may come from the earlier turns, so that the question may be accepted without them."""
        return bool(self.turns) and not self.is_single and _OF_A_MESSAGE.match(error.field) is not None

    @contextmanager
    def asking_singly(self) -> Generator[None, None, None]:
        """Sends no earlier turns, and none later either, unless the body fails."""
        self.is_single = True
        try:
            yield
        except LongleafError:
            self.is_single = False
            raise

    def reset(self) -> None:
        """Begins a new conversation."""
        self.turns = []
        self.is_single = False

    def open(self, context: str | None) -> None:
        """Begins a new conversation about a context, or without one. Raises NotFound."""
        if context is not None:
            self._client.get_context(context)
        self.context = context
        self.reset()

    def instruct(self, system: str) -> None:
        """Changes the system message; an empty one removes it."""
        self.system = system

    def request_sources(self, num_spans: int | None) -> None:
        """Requests so many spans as sources of each further answer about a context; None requests none."""
        self.num_sources = num_spans

    def trace(self, turn: Turn, num_spans: int) -> Turn:
        """Generates the answer of a turn again, with the same seed and length and with the spans of the context that it
        attends to."""
        options = turn.options.copy()
        options.update(max_tokens=max(1, turn.num_tokens), until_full=False, provenance=Provenance(num_spans=num_spans))
        again = Turn(turn.question, turn.messages, options)
        for _ in self.ask(again):
            pass
        return again
