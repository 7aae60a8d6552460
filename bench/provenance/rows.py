"""From single questions to rows."""

from collections.abc import Iterable, Sequence
from typing import Any

from bench.provenance.asking import Attributed

Row = dict[str, Any]


def rows(answers: Iterable[Attributed]) -> list[Row]:
    """Rows by length, task and method, for right and for wrong answers separately; then, by length, how well share and
    drop separate answers that are in the text from answers that are not.
    """
    groups = dict[tuple[int, str, str, bool], list[Attributed]]()
    for each in answers:
        if each.task != "absent":
            groups.setdefault((each.tokens, each.method, each.task, each.is_right), []).append(each)
    rows_by_group = [_row(*key, found) for key, found in sorted(groups.items())]
    lengths = sorted({(each.tokens, each.method) for each in answers})
    return rows_by_group + [row for key in lengths if (row := _apart(*key, answers)) is not None]


def _row(tokens: int, method: str, task: str, is_right: bool, found: Sequence[Attributed]) -> Row:
    row: Row = {
        "tokens": tokens,
        "task": task,
        "method": method,
        "answers": "right" if is_right else "wrong",
        "top1": sum(each.rank == 0 for each in found),
        "top3": sum(each.rank is not None and each.rank < 3 for each in found),
        "of": len(found),
    }
    confirmed = [each.has_largest_drop for each in found if each.has_largest_drop is not None]
    return row | ({"drop_is_largest": sum(confirmed)} if confirmed else {})


def _apart(tokens: int, method: str, answers: Iterable[Attributed]) -> Row | None:
    """Area under the curve of share, and of drop: right answers from a text against keys that are not in it."""
    here = [each for each in answers if (each.tokens, each.method) == (tokens, method)]
    resident = [each for each in here if each.task != "absent" and each.is_right]
    absent = [each for each in here if each.task == "absent"]
    if not resident or not absent:
        return None
    by_share = area([each.share for each in resident], [each.share for each in absent])
    by_drop = area([each.drop for each in resident], [each.drop for each in absent])
    row = {"tokens": tokens, "task": "held_or_absent", "method": method}
    row |= {"area_by_share": round(by_share, 4), "area_by_drop": round(by_drop, 4), "of": len(resident) + len(absent)}
    return row | {"absent": len(absent), "invented": sum(not each.is_right for each in absent)}


def area(above: Sequence[float], below: Sequence[float]) -> float:
    """The probability that a number of `above` is larger than one of `below`, equal ones counted half: the area under
    the ROC curve (Mann and Whitney 1947)."""
    wins = sum((high > low) + 0.5 * (high == low) for high in above for low in below)
    return wins / (len(above) * len(below))
