"""Text tables of the results."""

from collections.abc import Iterator, Sequence

from bench.durable.options import Row

NOT_FIGURES = ("part", "goals", "machine")


def table(rows: Sequence[Row]) -> str:
    """Lines for each part: its figures, then its goals."""
    return "\n".join(line for row in rows for line in _lines(row))


def _lines(row: Row) -> Iterator[str]:
    yield row["part"]
    for name, value in row.items():
        if name not in NOT_FIGURES:
            yield f"  {name:28} {_shown(value)}"
    for goal in row["goals"]:
        verdict = "met" if goal["is_met"] else "missed"
        yield f"  {goal['name']:28} {goal['value']}, wanted {goal['wanted']}: {verdict}"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
