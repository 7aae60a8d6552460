"""Sequences whose rows bring drafts, on ranks that are driven plan by plan."""

import random
from collections.abc import Callable, Iterable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from longleaf.positions import EVERY_RANK, OWN_ROPE
from longleaf.rank_protocol.row_delta import row_delta
from longleaf.rank_protocol.step import Attention, Decode, PenaltyHistory, Row, SamplingTerms, Spans, StepResult
from longleaf.runs import Run, join, until
from longleaf.sampling import SamplingParams, Token
from tests.support.golden.epochs import Service
from workers.rank import Rank

Ids = tuple[int, ...]
Drafter = Callable[[int, int, int], Ids]
"""Of a sequence, by its number among those that are asked, the index of the token behind its last one, and how many
there is room for."""
SAMPLINGS = (
    SamplingParams(num_logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, num_logprobs=2),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=2),
    SamplingParams(
        temperature=1.1, top_k=40, presence_penalty=0.7, logit_bias={7: 2.0, 11: 1.0}, seed=5, num_logprobs=2
    ),
)


def never(sequence: int, index: int, room: int) -> Ids:
    return ()


def guess(answers: Sequence[Ids], most: int, share: float, seed: int = 0) -> Drafter:
    """Drafts of which each is right with this probability, where the answers are known."""
    rng = random.Random(seed)

    def draft(sequence: int, index: int, room: int) -> Ids:
        known = answers[sequence][index : index + min(most if share in (0, 1) else rng.randint(0, most), room)]
        return tuple(token if rng.random() < share else (token + 1) % 500 for token in known)

    return draft


def refuse(answers: Sequence[Ids], count: int, number: int) -> Drafter:
    """So many drafts in each step, of which the one with this number is wrong, if there is one."""

    def draft(sequence: int, index: int, room: int) -> Ids:
        known = answers[sequence][index : index + min(count, room)]
        return tuple((token + 1) % 500 if i == number else token for i, token in enumerate(known))

    return draft


class Drafting:
    """Sequences that are answered in a batch, as a coordinator does: only the growth of a segment is sent."""

    def __init__(self, service: Service, draft: Drafter) -> None:
        self._service = service
        self._draft = draft
        self.sequences: list[int] = []
        self.outputs: list[list[Token]] = []
        self._is_compared: list[bool] = []
        self.num_steps = 0
        self.num_refused = 0
        self.results: list[StepResult] = []
        self.accepted: list[tuple[int, Row, int]] = []
        """The number of a step, a row of it, and the end of the accepted tokens."""

    def ask(
        self,
        path: Ids,
        question: Ids,
        start: int,
        sampling: SamplingParams,
        before: Ids = (),
        spans: Spans | None = None,
    ) -> Row:
        """The first row of a new sequence. Its answer is compared if the tokens before the question are given."""
        seen = PenaltyHistory(question, ()) if sampling.has_penalties else None
        row = self._service.begin(path, question, start, 0, spans=spans)
        self.sequences.append(row.sequence)
        self.outputs.append([])
        self._is_compared.append(bool(before))
        return replace(row, terms=SamplingTerms(sampling, seen, before and before + question))

    def answer(self, rows: Sequence[Row], count: int) -> list[Ids]:
        """So many tokens of each."""
        left = list(rows)
        while left:
            result = self._service.epoch.execute(Decode(tuple(left)))
            self.results.append(result)
            self.num_steps += 1
            for row in left:
                self._commit(row, result.tokens[row.sequence])
            self.audit()
            left = [self.next_row(row, count) for row in left if len(self._tokens_of(row)) < count]
        return [tuple(token.id for token in reported) for reported in self.outputs]

    def _tokens_of(self, row: Row) -> list[Token]:
        return self.outputs[self.sequences.index(row.sequence)]

    def _commit(self, row: Row, tokens: tuple[Token, ...]) -> None:
        """Removes rejected drafts from the layout."""
        assert 1 <= len(tokens) <= 1 + len(row.draft_ids)
        assert tuple(token.id for token in tokens[:-1]) == row.draft_ids[: len(tokens) - 1]
        self._tokens_of(row).extend(tokens)
        self.num_refused += 1 + len(row.draft_ids) - len(tokens)
        tail, size = self._service._tails[row.sequence], self._service._size
        end = row.start + row.num_known + len(tokens) - 1
        self.accepted.append((self.num_steps, row, end))
        last = tail.runs[-1]
        tail.put([until(last, end, size)], [last])
        tail.window_runs = self._service._window_pool.cut(tail.window_runs, end)

    def next_row(self, row: Row, count: int) -> Row:
        """The row of a sequence's next step; drafts open no block."""
        service, tail = self._service, self._service._tails[row.sequence]
        sequence = self.sequences.index(row.sequence)
        reported, last, known = self.outputs[sequence], tail.runs[-1], tail.window_runs
        start, room = last.end, len(last.blocks) * service._size - len(last)
        room = min((room or service._size) - 1, count - len(reported) - 1)
        drafts = self._draft(sequence, len(reported), room)
        assert len(drafts) <= room
        rank = (start + row.sequence) % len(service.alive)
        runs = service._grow(tail, start, 1 + len(drafts), rank, len(drafts))
        windows = tail.window_runs and row_delta(known, tail.window_runs, service.window_size)
        is_complete = self._is_compared[sequence] and len(reported) + 1 + len(drafts) == count
        num_reference = start + 1 + len(drafts) if is_complete else 0
        return Row(
            row.sequence, (), start, (), runs, len(reported), None, num_reference, OWN_ROPE, windows, draft_ids=drafts
        )

    def attention_alone(self, number: int, question: Ids, start: int, spans: Spans) -> list[Attention]:
        """The attention of each token of an answer, computed again by a row without drafts over the stored keys."""
        service, first = self._service, start + len(question) - 1
        path = service._tails[self.sequences[number]].path
        token_ids = (question[-1], *(token.id for token in self.outputs[number][:-1]))
        rows = tuple(service.begin(path, (token,), first + i, 0, spans=spans) for i, token in enumerate(token_ids))
        attention = service.epoch.execute(Decode(rows)).attention
        return [attention[row.sequence][0] for row in rows]

    @property
    def ranks(self) -> Sequence[Rank]:
        return self._service.epoch.ranks

    def keys(self, sequence: int) -> dict[tuple[int, int], Tensor]:
        """The stored keys of a sequence's own tokens, by rank and layer."""
        windows, size = self._service._windows, self._service._size
        tail = self._service._tails[self.sequences[sequence]]
        found = {}
        for number, rank in enumerate(self.ranks):
            own = [run for run in tail.runs if run.rank == number]
            for layer, spec in rank.model.layers.items():
                slots = slots_of(own if windows is None or spec.reach.is_full else tail.window_runs, size)
                found[number, layer] = rank.pool.take(layer, torch.tensor(slots, dtype=torch.long))
        return found

    def states(self, sequence: int) -> dict[tuple[int, str], Tensor]:
        """The recurrent states at the end of a sequence, by rank and part."""
        run = self._service._tails[self.sequences[sequence]].window_runs[-1]
        return {
            (number, part.name): part.tensor[:, run.blocks[-1]]
            for number, rank in enumerate(self.ranks)
            for part in rank.pool.blocks(of_windows=True)
        }

    def audit(self) -> None:
        """All ranks know the end of each sequence, whichever rank holds its keys, and hold no rejected drafts."""
        for sequence in self.sequences:
            tail = self._service._tails[sequence]
            for rank in self.ranks:
                assert rank.epoch is not None
                for owner in (*range(len(self.ranks)), EVERY_RANK):
                    runs = tail.window_runs if owner == EVERY_RANK else [run for run in tail.runs if run.rank == owner]
                    found = list(rank.epoch._block_table.resident_extents(tail.path[-1], 0, 1 << 30, owner))
                    assert join((run.start, run.end) for run in runs) == join((one.start, one.end) for one in found)

    def blocks(self, number: int) -> list[Tensor]:
        """The bytes that a rank stores for the sequences' own tokens, and for their blocks."""
        tails = [self._service._tails[sequence] for sequence in self.sequences]
        runs = [run for tail in tails for run in tail.runs if run.rank == number]
        slots, blocks = slots_of(runs, self._service._size), [block for run in runs for block in run.blocks]
        parts = self.ranks[number].pool.blocks(of_windows=False)
        return [
            part.tensor.flatten(1, 2)[:, slots] if part.has_slots else part.tensor[:, blocks].clone() for part in parts
        ]


def slots_of(runs: Iterable[Run], size: int, start: int = 0) -> list[int]:
    """Slots of the positions of runs, from `start` on."""
    return [
        run.blocks[(position - run.start) // size] * size + (position - run.start) % size
        for run in runs
        for position in range(max(start, run.start), run.end)
    ]
