"""Steps that a rank has begun."""

from collections.abc import Callable

from longleaf.rank_protocol.step import StepResult


class StepHandle:
    """A step that was begun: a device may still be at it, and tell only later what came of it."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], StepResult | None]) -> None:
        """`finish` waits for the device, and says what is to be answered."""
        self._is_done = is_done
        self._finish: Callable[[], StepResult | None] | None = finish
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        """Whether nobody has to be waited for."""
        return self._finish is None or self._is_done()

    def result(self) -> StepResult | None:
        """Waits for the end of the step. Only rank 0 has something to answer."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


def done(result: StepResult | None) -> StepHandle:
    """A step that is over."""
    return StepHandle(lambda: True, lambda: result)
