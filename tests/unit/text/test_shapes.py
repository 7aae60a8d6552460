"""What templates make of roles is rendered once, and what they cannot show is told of the message."""

from collections.abc import Sequence

import pytest

from coordinator.text.shapes import MAX_IDS, MAX_SHAPES, NoTemplate, Render, ShapeRefused, Shapes
from coordinator.text.template import Rendering, Shape, render_shapes
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import embedded_model
from longleaf.errors import ModelRefused, StartError, Unavailable
from tests.support.chat_templates import CHATML, FOLDING, FORGETFUL, GEMMA, LLAMA, MISTRAL, THINKING

S, U, A = "system", "user", "assistant"
TURNS = (U, A, U)


class Rendered:
    """Says what a template makes of shapes, and notes what it was asked for."""

    def __init__(self, source: str = CHATML) -> None:
        self.source = source
        self.asked: list[list[Shape]] = []
        self.error: Exception | None = None

    def __call__(self, shapes: Sequence[Shape]) -> list[Rendering]:
        self.asked.append(list(shapes))
        if self.error is not None:
            raise self.error
        return render_shapes(self.source, {"bos_token": "<|begin|>"}, shapes)


def encode(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def shapes_of(source: str) -> Shapes:
    return Shapes(Rendered(source), encode)


def test_usual_shapes_are_there_from_the_start() -> None:
    rendered = Rendered()
    shapes = Shapes(rendered, encode)
    for turns in range(8):
        for opening in ((), (S,)):
            shape = (*opening, *(U, A) * turns, U)
            parts = shapes.find(shape)
            assert parts is not None
            assert tuple("".join(map(chr, part)) for part in parts) == render_shapes(CHATML, {}, [shape])[0].parts
    assert len(rendered.asked) == 1


def test_other_shapes_are_rendered_once() -> None:
    rendered = Rendered()
    shapes = Shapes(rendered, encode)
    assert shapes.find((U, U)) is None
    made = shapes.make((U, U))
    assert len(made) == 3
    assert shapes.find((U, U)) == shapes.make((U, U)) == made
    assert rendered.asked[1:] == [[(U, U)]]


def test_what_is_refused_is_not_rendered_again() -> None:
    rendered = Rendered(GEMMA)
    shapes = Shapes(rendered, encode)
    for ask in (shapes.make, shapes.make, shapes.find):
        with pytest.raises(ShapeRefused, match="must alternate") as caught:
            ask((U, U))
        assert caught.value.message == 1
    assert rendered.asked[1:] == [[(U, U)]]


def test_few_shapes_are_kept_and_the_usual_ones_always() -> None:
    rendered = Rendered()
    shapes = Shapes(rendered, lambda text: (len(text),))
    shapes.make((U, U))
    for count in range(MAX_SHAPES + 10):
        shapes.make((A,) * (count + 1) + (U,))
        shapes.make((U, U))
    assert shapes.num_kept == MAX_SHAPES
    assert rendered.asked.count([(U, U)]) == 1, "it was asked for last"
    assert shapes.find((A, U)) is None
    assert shapes.find((U,)) == shapes.question


def test_what_takes_more_memory_than_all_may_is_not_kept() -> None:
    source = CHATML + "{% if messages | length == 2 %}{{ 'x' * 600000 }}{% endif %}"
    shapes = shapes_of(source)
    assert 600_000 < MAX_IDS
    for shape in ((U, U), (A, U)):
        shapes.make(shape)
        shapes.audit()
    assert shapes.num_kept == 1


def test_a_shape_that_two_have_made_at_once_is_counted_once() -> None:
    rendered = Rendered()

    def render(asked: Sequence[Shape]) -> list[Rendering]:
        if len(asked) == 1 and len(rendered.asked) == 1:  # meanwhile another makes the same
            assert rendered(asked) and shapes.make((U, U))
        return rendered(asked)

    shapes = Shapes(render, encode)
    shapes.make((U, U))
    assert shapes.num_kept == 1 and rendered.asked.count([(U, U)]) == 3
    shapes.audit()


def test_a_rendering_that_was_broken_off_is_tried_again() -> None:
    rendered = Rendered()
    shapes = Shapes(rendered, encode)
    for rendered.error in (StartError("stopped"), ModelRefused("exit code 9"), OSError("no process")):
        with pytest.raises(Unavailable, match=str(rendered.error)):
            shapes.make((U, U))
    rendered.error = None
    assert len(shapes.make((U, U))) == 3


def test_what_there_was_no_time_for_at_the_start_is_rendered_when_it_is_asked_for() -> None:
    hurried: Render = lambda shapes: render_shapes(CHATML, {}, shapes[:1])  # noqa: E731
    shapes = Shapes(hurried, encode)
    assert shapes.find(TURNS) is None
    assert len(shapes.make(TURNS)) == 4


def test_a_template_that_shows_no_question_is_refused() -> None:
    with pytest.raises(ModelRefused, match="the chat template leaves out the user's message"):
        shapes_of("{{ bos_token }}")


@pytest.mark.parametrize(
    ("source", "shape", "message", "told"),
    [
        (GEMMA, (S, U), 0, "cannot be rendered: System role not supported"),
        (GEMMA, (U, A, U, A, A, U), 4, "cannot be rendered: Conversation roles must alternate"),
        (FOLDING, (S, U, U), 2, "roles must alternate"),
        (FOLDING, (U, A, S, U), 2, "roles must alternate"),
        (MISTRAL, (S, U, A, U), 0, "moves the system's message to another place"),
        (LLAMA, (U, S, U), None, ""),
        (FORGETFUL, (U, A, U), 0, "leaves out the user's message"),
        (FORGETFUL, (S, U, A, U), 0, "leaves out the system's message"),
        (THINKING, (U, A, U, A, U), 1, "leaves out the assistant's message"),
        (CHATML + "{{ messages[1].content if messages[1] }}", (U, A, U), 1, "repeats the assistant's message"),
        (
            "{{ messages[0].content }}{% for m in messages[1:] | reverse %}{{ m.content }}{% endfor %}",
            TURNS,
            1,
            "moves",
        ),
        (CHATML + "{% if messages[1] %}LONGLEAF999TEXT{% endif %}", TURNS, None, "more messages than there are"),
        ("{{ messages[0].content }}{{ raise_exception('x' * 9999) if messages[1] }}", (U, U), 1, "x" * 400),
        (
            "{{ messages[0].content }}{{ 'x' * 9999999 if messages[1] }}",
            (U, U),
            None,
            "makes 10,000,014 characters of the messages",
        ),
    ],
)
def test_a_message_that_cannot_be_shown_is_named(source: str, shape: Shape, message: int | None, told: str) -> None:
    shapes = shapes_of(source)
    if not told:
        assert len(shapes.make(shape)) == len(shape) + 1
        return
    with pytest.raises(ShapeRefused, match=told) as caught:
        shapes.make(shape)
    assert caught.value.message == message
    assert len(str(caught.value)) < 600


def test_without_a_template_a_question_is_all() -> None:
    shapes = NoTemplate((7,))
    assert shapes.find((U,)) == shapes.make((U,)) == shapes.question == ((7,), ())
    for shape, message in (((U, A, U), 1), ((S, U), 0), ((A, U), 0)):
        with pytest.raises(ShapeRefused, match="has no chat template") as caught:
            shapes.make(shape)
        assert caught.value.message == message


def test_the_model_in_the_package_is_asked_one_question_alone() -> None:
    """It would answer the first one again."""
    shapes = Tokenizer.load(embedded_model(), render_shapes).shapes
    assert len(shapes.make((U,))) == 2
    for shape, message in (((U, A, U), 1), ((U, U), 1), ((S, U, A, U), 2)):
        with pytest.raises(ShapeRefused, match="knows no conversation: ask one question alone") as caught:
            shapes.make(shape)
        assert caught.value.message == message
