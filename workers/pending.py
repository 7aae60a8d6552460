"""Steps that a rank has begun."""

from collections.abc import Callable

from longleaf.rank_protocol.step import StepResult


class StepHandle:
    """A step that was begun. A device may still be computing it; its result is available later."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], StepResult | None]) -> None:
        """`finish` waits for the device and returns the result."""
        self._is_done = is_done
        self._finish: Callable[[], StepResult | None] | None = finish
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._finish is None or self._is_done()

    def result(self) -> StepResult | None:
        """Waits for the end of the step. Only rank 0 has a result."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


def done(result: StepResult | None) -> StepHandle:
    """A step that has finished."""
    return StepHandle(lambda: True, lambda: result)
