"""The key in each slot of a group's members. Members are lost and join; each member keeps its slots.

A key stands for its token, the token's rotation, and all tokens before it, because attention computes the key from
its inputs. A recomputed key is therefore right only if the inputs were.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longleaf.positions import EVERY_RANK, Rope, WindowSpec
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.rank_protocol.snapshots import Save
from longleaf.rank_protocol.step import Move, Prefill, Restore, Row, StepPlan
from longleaf.runs import Run, until
from longleaf.sampling import Token
from tests.support.fakes.echo_model import echo_tokens


class Key(NamedTuple):
    """The key of a token after others."""

    number: int
    """Its own: equal keys have the same."""
    before: int
    """Number of the key before it; 0: none."""
    token_id: int
    rope: Rope


class Book:
    """The ranks' view of a segment."""

    def __init__(self, start: int, runs: Iterable[Run] = (), window_runs: tuple[Run, ...] = ()) -> None:
        self.start = start
        self.runs = list(runs)
        self.window_runs = window_runs


Slot = tuple[int, bool, int]
"""Of a member, in the pool of windows or in the other one."""
Content = dict[int, Key]
"""Of a piece: its keys by position."""


class ShadowKeyCache:
    """Executes plans. Raises AssertionError if a plan reads a missing key or contradicts the ledger."""

    def __init__(self, num_ranks: int, block_size: int, windows: WindowSpec | None) -> None:
        self._block_size = block_size
        self._window_block_size = block_size if windows is None else windows.block_size(block_size)
        self._windows = windows
        self.members = list(range(num_ranks))
        """By rank."""
        self._num_members = num_ranks
        self.numbers: dict[tuple[int, int, Rope], int] = {}
        self._keys: dict[Slot, Key | None] = {}
        """None: written by a failed step, or a rejected draft."""
        self.books: dict[int, Book] = {}
        self.fetched: dict[tuple[int, int], Content] = {}
        """By member and ticket."""
        self._last: dict[int, int] = {}

    # --- epochs ---

    def change_ranks(self, before: Sequence[int | None]) -> None:
        """Lost members take their keys with them; new members have none. No rank knows a segment until a layout is
        sent."""
        members = list[int]()
        for rank in before:
            if rank is None:
                self._num_members += 1
            members.append(self._num_members - 1 if rank is None else self.members[rank])
        self.members = members
        self._keys = {slot: key for slot, key in self._keys.items() if slot[0] in members}
        self.books.clear()
        self._last.clear()

    def set_layout(self, segments: Sequence[SegmentLayout]) -> None:
        self.books = {one.segment: Book(one.start, one.runs, one.window_runs) for one in segments}
        self._check_blocks()

    def wreck(self, plan: StepPlan) -> None:
        """Leaves nothing sensible where a plan writes, which broke."""
        work = plan.work
        if isinstance(work, Move):
            written = [transfer.target for transfer in work.transfers]
            windows = list[Run]()
        elif isinstance(work, Restore):
            written, windows = list(work.runs), list(work.window_runs)
        elif isinstance(work, Prefill):
            written = list(work.pieces)
            windows = [self._from(run, work.start) for run in work.window_runs]
        else:
            written = [self._from(run, row.start) for row in work.rows for run in row.runs]
            windows = [self._from(run, row.start) for row in work.rows for run in row.window_runs]
        for run in written:
            for slot in self._slots(run):
                self._keys[self.members[run.rank], False, slot] = None
        for slot in (slot for run in windows for slot in self._slots(run)):
            for member in self.members:
                self._keys[member, True, slot] = None

    def _from(self, run: Run, start: int) -> Run:
        size = self._size(run)
        skipped = max(0, start - run.start) // size
        if start >= run.end:
            return Run(run.rank, run.end, run.end, ())
        inside = max(0, start - run.start) % size
        first = run.start + skipped * size
        whole = Run(run.rank, first, run.end, run.blocks[skipped:])
        return whole if not inside else Run(run.rank, first + size, run.end, whole.blocks[1:])

    def _size(self, run: Run) -> int:
        return self._window_block_size if run.rank == EVERY_RANK else self._block_size

    # --- plans ---

    def apply(self, plan: StepPlan) -> dict[int, tuple[Token, ...]]:
        """Does a whole plan; sampled tokens by sequence."""
        for segment in plan.release_segments:
            del self.books[segment]
        for segment, end in plan.cut_segments:
            self._cut(self.books[segment], end)
        for sequence in plan.release_sequences:
            self._last.pop(sequence, None)
        work = plan.work
        if isinstance(work, Move):
            self._move(work)
            return {}
        if isinstance(work, Restore):
            self._restore(work)
            return {}
        if isinstance(work, Prefill):
            assert len({run.rank for run in work.pieces}) == len(work.pieces)
            self._store(work, work.token_ids, work.pieces)
            return {}
        return {row.sequence: self._row(row) for row in work.rows}

    def _row(self, row: Row) -> tuple[Token, ...]:
        assert (row.terms is None) == (row.sequence in self._last), "terms are sent once, with the first row"
        token_ids = row.token_ids or (self._last[row.sequence],)
        self._store(row, (*token_ids, *row.draft_ids), row.runs)
        sampled = echo_tokens(token_ids[-1], row.token_index, row.draft_ids)
        self._last[row.sequence] = sampled[-1]
        if row.draft_ids:
            self._cut_back(row, row.start + len(token_ids) + len(sampled) - 1)
        return tuple(map(Token, sampled))

    def _cut_back(self, row: Row, end: int) -> None:
        """Drafts from `end` on were rejected: no plan may read their slots."""
        book, run, first = self.books[row.path[-1]], row.runs[-1], row.start + row.num_known - 1
        assert (first - run.start) // self._block_size == (len(run) - 1) // self._block_size, "a draft opens a block"
        for position in range(end, run.end):
            self._write(book, position, None)
            for member in self.members if self._windows is not None else ():
                self._keys[member, True, self._window_slot(book, position)] = None
        book.runs[book.runs.index(run)] = until(run, end, self._block_size)
        book.window_runs = tuple(until(run, end, self._window_block_size) for run in book.window_runs)

    def _cut(self, book: Book, end: int) -> None:
        """An answer ended at `end`: no plan may read the slots of later tokens."""
        for position in range(end, book.runs[-1].end):
            self._write(book, position, None)
        book.runs = [until(run, end, self._block_size) for run in book.runs if run.start < end]

    def _store(self, work: Prefill | Row, token_ids: Sequence[int], runs: Sequence[Run]) -> None:
        book = self.books.setdefault(work.path[-1], Book(work.start))
        fresh = dict(zip(self._fresh(work, runs), token_ids, strict=True))
        self._enter(book, runs)
        self._check_blocks()
        end = runs[-1].end
        chain = list[Key]()
        for position in range(end):
            if position in fresh:
                self._check_windows(work, book, chain, position)
                key = self._key(chain[-1].number if chain else 0, fresh[position], work.rope)
                self._write(book, position, key)
            else:
                key = self._read(work.path, position)
                assert key.before == (chain[-1].number if chain else 0), "a key was computed from others"
                assert key.rope == work.rope, "a key is rotated otherwise"
            chain.append(key)
        book.window_runs = work.window_runs
        if self._windows is not None:
            self._keep_windows(work, chain, end)

    def _fresh(self, work: Prefill | Row, runs: Sequence[Run]) -> list[int]:
        """The positions of the tokens of a step."""
        if isinstance(work, Row):
            return list(range(work.start, runs[-1].end))
        positions = [position for run in runs for position in range(run.start, run.end)]
        assert positions == sorted(positions)
        assert positions[0] == work.start
        assert self._windows is None or positions == list(range(work.start, runs[-1].end))
        return positions

    def _enter(self, book: Book, runs: Sequence[Run]) -> None:
        for run in runs:
            known = [other for other in book.runs if other.start == run.start]
            for grown in known:
                assert (grown.rank, grown.blocks) == (run.rank, run.blocks[: len(grown.blocks)])
                assert grown.end < run.end
                book.runs.remove(grown)
            book.runs.append(run)
        book.runs.sort(key=lambda run: run.start)
        ends = [book.start, *(run.end for run in book.runs)]
        assert all(end <= run.start < run.end for end, run in zip(ends, book.runs, strict=False))

    def _move(self, work: Move) -> None:
        for transfer in work.transfers:
            book, old, new = self.books[transfer.segment], transfer.source, transfer.target
            assert (old.start, old.end) == (new.start, new.end)
            (run,) = (run for run in book.runs if run.rank == old.rank and run.start <= old.start < run.end)
            assert list(self._slots(old)) == list(self._slots(run))[old.start - run.start : old.end - run.start]
            keys = [self._keys[self.members[old.rank], False, slot] for slot in self._slots(old)]
            for slot, key in zip(self._slots(new), keys, strict=True):
                self._keys[self.members[new.rank], False, slot] = key
            split = (old.start - run.start) // self._block_size
            stop = split + len(old.blocks)
            rest = [
                Run(run.rank, run.start, old.start, run.blocks[:split]),
                new,
                Run(run.rank, old.end, run.end, run.blocks[stop:]),
            ]
            book.runs.remove(run)
            book.runs = sorted([*book.runs, *(one for one in rest if len(one))], key=lambda run: run.start)
        for slot in (slot for run in work.windows for slot in self._slots(run)):
            for member in self.members:
                self._keys[member, True, slot] = self._keys.get((self.members[0], True, slot))
        self._check_blocks()

    # --- pieces ---

    def save(self, member: int, order: Save) -> Content:
        """The content of a piece that a member saves."""
        book, content = self.books[order.segment], Content()
        for run in order.runs:
            whole = book.window_runs if order.of_windows else book.runs
            (resident,) = (one for one in whole if one.rank == run.rank and one.start <= run.start < one.end)
            assert run.rank == (EVERY_RANK if order.of_windows else self.members.index(member))
            assert (
                list(self._slots(run))
                == list(self._slots(resident))[run.start - resident.start : run.end - resident.start]
            )
            for position in range(run.start, run.end):
                key = self._keys[member, order.of_windows, self._slot(run, position)]
                assert key is not None, "a key of a broken step is saved"
                content[position] = key
        return content

    def _restore(self, work: Restore) -> None:
        book = self.books.setdefault(work.segment, Book(work.start))
        assert book.start == work.start
        assert all(len({run.rank for run in portion.runs}) == 1 for portion in work.portions)
        for portion in work.portions:
            for run in portion.runs:
                self._take_in(self.members[run.rank], portion.ticket, run, of_windows=False)
        for run in work.window_runs:
            for member in self.members:
                self._take_in(member, work.window_ticket, run, of_windows=True)
        self._enter(book, work.runs)
        book.window_runs = work.window_runs or book.window_runs
        self._check_blocks()

    def _take_in(self, member: int, ticket: int, run: Run, *, of_windows: bool) -> None:
        content = self.fetched.get((member, ticket))
        assert content is not None, "what was not fetched is to be restored"
        for position in range(run.start, run.end):
            assert position in content, "the piece has no such position"
            self._keys[member, of_windows, self._slot(run, position)] = content[position]

    # --- windows ---

    def _check_windows(self, work: Prefill | Row, book: Book, chain: list[Key], position: int) -> None:
        """The windows that a token sees before its chunk are there on every member."""
        if self._windows is not None and position == work.start:
            self._check_window(work.path, chain, position)

    def _check_window(self, path: tuple[int, ...], chain: list[Key], end: int) -> None:
        assert self._windows is not None
        for position in range(self._windows.first(end), end):
            for member in self.members:
                slot = self._window_slot(self._book_of(path, position), position)
                assert self._keys[member, True, slot] == chain[position], "a window is not there"

    def _keep_windows(self, work: Prefill | Row, chain: list[Key], end: int) -> None:
        assert self._windows is not None
        book, start = self.books[work.path[-1]], work.start
        is_last_only = isinstance(work, Prefill) or self._windows.is_state
        num_drafts = len(work.draft_ids) if isinstance(work, Row) else 0  # each draft has a state
        seen_from = max(start, self._windows.first(end - num_drafts)) if is_last_only else start
        resident = {position for run in book.window_runs for position in range(run.start, run.end)}
        assert resident.issuperset(range(seen_from, end))
        for position in (position for position in resident if start <= position < end):
            for member in self.members:
                self._keys[member, True, self._window_slot(book, position)] = chain[position]

    def _window_slot(self, book: Book, position: int) -> int:
        (run,) = (run for run in book.window_runs if run.start <= position < run.end)
        return self._slot(run, position)

    # --- keys ---

    def chain(self, path: tuple[int, ...], end: int) -> list[Key]:
        """The keys of a path up to position `end`, each computed from the one before it."""
        chain = [self._read(path, position) for position in range(end)]
        for number, key in enumerate(chain):
            assert key.before == (chain[number - 1].number if number else 0)
        return chain

    def check_end(self, path: tuple[int, ...], end: int) -> None:
        """All that a token at `end` sees of windows is there."""
        if self._windows is not None:
            self._check_window(path, self.chain(path, end), end)

    def _key(self, before: int, token_id: int, rope: Rope) -> Key:
        number = self.numbers.setdefault((before, token_id, rope), len(self.numbers) + 1)
        return Key(number, before, token_id, rope)

    def _book_of(self, path: tuple[int, ...], position: int) -> Book:
        return [self.books[segment] for segment in path if self.books[segment].start <= position][-1]

    def _read(self, path: tuple[int, ...], position: int) -> Key:
        found = [run for run in self._book_of(path, position).runs if run.start <= position < run.end]
        assert found, "a key that no member holds is read"
        (run,) = found
        key = self._keys[self.members[run.rank], False, self._slot(run, position)]
        assert key is not None, "a key of a broken step is read, or of a refused draft"
        return key

    def _write(self, book: Book, position: int, key: Key | None) -> None:
        (run,) = (run for run in book.runs if run.start <= position < run.end)
        self._keys[self.members[run.rank], False, self._slot(run, position)] = key

    def _slot(self, run: Run, position: int) -> int:
        size = self._size(run)
        number, rest = divmod(position - run.start, size)
        return run.blocks[number] * size + rest

    def _slots(self, run: Run) -> Iterable[int]:
        return (self._slot(run, position) for position in range(run.start, run.end))

    def _check_blocks(self) -> None:
        runs = [run for book in self.books.values() for run in book.runs]
        blocks = [(run.rank, block) for run in runs for block in run.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in two runs"
        assert all(0 < len(run) <= len(run.blocks) * self._block_size for run in runs)
        assert all(0 <= run.rank < len(self.members) for run in runs)
        windows = [run for book in self.books.values() for run in book.window_runs]
        assert all(run.rank == EVERY_RANK for run in windows)
