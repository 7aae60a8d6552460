"""What a chat template puts around texts, as ids, by the roles of the messages: nothing else decides it."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from coordinator.text.template import Rendering, Shape
from longleaf.errors import ModelRefused, StartError, Unavailable

Ids = tuple[int, ...]
Parts = tuple[Ids, ...]
"""Ids before, between and after the texts: one more than there are messages."""
Render = Callable[[Sequence[Shape]], Sequence[Rendering]]
"""Renders shapes, at least the first of them; may take seconds. Raises StartError."""
QUESTION: Shape = ("user",)
PREFACED: Shape = ("system", "user")
MAX_USUAL = 16
"""Messages of the longest conversations that are rendered before somebody asks."""
MAX_SHAPES = 256
MAX_IDS = 1 << 20
"""Shapes, and ids of all their parts, that are kept of others."""


def _usual() -> list[Shape]:
    """A question first, then conversations in which user and model take turns, the shorter ones first."""
    turns = [(*("user", "assistant") * half, "user") for half in range(MAX_USUAL // 2)]
    return [shape for turn in turns for shape in (turn, ("system", *turn))]


class ShapeRefused(Exception):
    """Messages of these roles cannot be made a prompt; `message` is the number of the one to blame, if it is one."""

    def __init__(self, told: str, message: int | None) -> None:
        super().__init__(told)
        self.message = message


class _Refusal(msgspec.Struct, frozen=True):
    """What is kept of a shape that was refused: an error itself would keep the frames that it went through."""

    reason: str
    message: int | None

    def error(self) -> ShapeRefused:
        return ShapeRefused(f"the chat template {self.reason}", self.message)


class Shapes:
    """The shapes of one template: the usual ones for good, and of others those that were asked for last. For several
    threads."""

    def __init__(self, render: Render, encode: Callable[[str], Ids]) -> None:
        """Takes seconds. `encode` makes ids of what templates say. Raises ModelRefused for a template that cannot show
        a single message of a user, and what `render` raises."""
        self._render, self._encode = render, encode
        self._lock = threading.Lock()
        self._other: OrderedDict[Shape, Parts | _Refusal] = OrderedDict()
        self._num_ids = 0
        shapes = _usual()
        # What the template was too slow for is tried again when it is asked for.
        self._usual = {shape: self._made(found) for shape, found in zip(shapes, render(shapes), strict=False)}
        question = self._usual[QUESTION]
        if isinstance(question, _Refusal):
            raise ModelRefused(str(question.error()))
        self.question = question
        """What is put around a single message of a user."""

    def _made(self, rendering: Rendering) -> Parts | _Refusal:
        if rendering.reason:
            return _Refusal(rendering.reason, rendering.message)
        ids = {part: self._encode(part) for part in set(rendering.parts)}
        return tuple(ids[part] for part in rendering.parts)

    def find(self, shape: Shape) -> Parts | None:
        """The parts of a shape, if it is known. Raises ShapeRefused."""
        with self._lock:
            found = self._usual.get(shape) or self._other.get(shape)
            if shape in self._other:
                self._other.move_to_end(shape)
        if isinstance(found, _Refusal):
            raise found.error()
        return found

    def make(self, shape: Shape) -> Parts:
        """The parts of a shape, rendered if they are not known. Takes a while, seconds at most. Raises ShapeRefused,
        and Unavailable when the rendering was broken off."""
        if (found := self.find(shape)) is not None:
            return found
        try:
            made = self._made(self._render([shape])[0])
        except (StartError, OSError) as error:
            raise Unavailable(f"the chat template was not rendered: {error}") from error
        self._keep(shape, made)
        if isinstance(made, _Refusal):
            raise made.error()
        return made

    def _keep(self, shape: Shape, made: Parts | _Refusal) -> None:
        with self._lock:
            before = self._other.get(shape, ())  # two may have made the same
            self._other[shape] = made
            self._num_ids += _num_ids(made) - _num_ids(before)
            while self._num_ids > MAX_IDS or len(self._other) > MAX_SHAPES:
                _, gone = self._other.popitem(last=False)
                self._num_ids -= _num_ids(gone)

    @property
    def num_kept(self) -> int:
        """Shapes that are kept beside the usual ones."""
        return len(self._other)

    def audit(self) -> None:
        """The ids that are counted are those that are kept."""
        with self._lock:
            assert self._num_ids == sum(map(_num_ids, self._other.values())) <= MAX_IDS


def _num_ids(made: Parts | _Refusal) -> int:
    return 0 if isinstance(made, _Refusal) else sum(map(len, made))


class NoTemplate:
    """The shapes of a model without a template: it can be asked a single question, as plain text."""

    def __init__(self, opening: Ids) -> None:
        """`opening` are the ids before a plain prompt."""
        self.question: Parts = (opening, ())

    def find(self, shape: Shape) -> Parts | None:
        """Raises ShapeRefused."""
        if shape != QUESTION:
            stranger = next((number for number, role in enumerate(shape) if number or role != "user"), 0)
            raise ShapeRefused("the model has no chat template: it can be asked one question alone", stranger)
        return self.question

    def make(self, shape: Shape) -> Parts:
        """Raises ShapeRefused."""
        return self.find(shape) or self.question
