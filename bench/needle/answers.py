"""Answers on disk, one line each, so that an interrupted measurement resumes; and their table."""

from collections.abc import Iterable, Iterator
from math import sqrt
from pathlib import Path

import msgspec

Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""
DEPTHS = 10
"""Parts of a document by which accuracy is reported."""


class Place(msgspec.Struct, frozen=True):
    """Which question of which document."""

    model: str
    seed: int
    tokens: int
    """Wanted length of the document."""
    document: int
    density: int
    """Questions per task that the document was made for."""
    task: str
    question: int


class Answer(msgspec.Struct, frozen=True):
    """A question, its answer, and whether the answer was right. Times in seconds, lengths in tokens."""

    place: Place
    depth: float | None
    text: str
    expected: tuple[str, ...]
    answer: str
    right: bool
    document_tokens: int
    ingest_tokens_per_s: float
    first_token_s: float


class Answers:
    """The file of all answers so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        self._found = {answer.place: answer for answer in map(_decode, lines)}

    def __contains__(self, place: Place) -> bool:
        return place in self._found

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._found.values())

    def add(self, answer: Answer) -> None:
        """Keeps the answer, on disk as well."""
        self._found[answer.place] = answer
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(answer) + b"\n")


def _decode(line: bytes) -> Answer:
    return msgspec.json.decode(line, type=Answer)


def rows(answers: Iterable[Answer]) -> list[dict[str, object]]:
    """Accuracy by model, task and length, over all depths (`depth` None) and by tenths of the document."""
    groups: dict[tuple[str, str, int, float | None], list[Answer]] = {}
    for answer in answers:
        key = (answer.place.model, answer.place.task, answer.place.tokens)
        groups.setdefault((*key, None), []).append(answer)
        if answer.depth is not None:
            tenth = min(int(answer.depth * DEPTHS), DEPTHS - 1) / DEPTHS
            groups.setdefault((*key, tenth), []).append(answer)
    ordered = sorted(groups, key=lambda key: (*key[:3], -1.0 if key[3] is None else key[3]))
    return [_row(*key, groups[key]) for key in ordered]


def _row(model: str, task: str, tokens: int, depth: float | None, group: list[Answer]) -> dict[str, object]:
    right = sum(answer.right for answer in group)
    low, high = wilson(right, len(group))
    return {
        "bench": "needle",
        "model": model,
        "task": task,
        "context_tokens": tokens,
        "depth": depth,
        "documents": len({(answer.place.seed, answer.place.document) for answer in group}),
        "asked": len(group),
        "right": right,
        "accuracy": round(right / len(group), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "ingest_tokens_per_s": round(sum(answer.ingest_tokens_per_s for answer in group) / len(group)),
        "first_token_s": round(sum(answer.first_token_s for answer in group) / len(group), 3),
    }


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927)."""
    share = right / total
    centre = share + Z * Z / (2 * total)
    spread = Z * sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    return max(0.0, (centre - spread) / (1 + Z * Z / total)), min(1.0, (centre + spread) / (1 + Z * Z / total))
