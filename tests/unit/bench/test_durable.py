"""The measurements of contexts that last: ratios, parts of a start, snapshots as files, the table and the page."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.durable import __main__ as durable
from bench.durable import catalog, journal, parked, restart, saving, storage
from bench.durable.asking import Answered
from bench.durable.options import Goal, Options, result
from bench.durable.restart import Kept, Start
from bench.durable.room import kv_bytes, token_bytes
from bench.durable.saving import Beside, Saved, Times
from bench.durable.service import command
from bench.durable.snapshots import SnapshotFolder, plain_copy
from bench.durable.table import table
from coordinator.events import Admitted, Tokens
from coordinator.journal.journal import Journal
from longleaf.config import embedded_model

OPTIONS = Options(tokens=64, repeats=2, world_size=2)
ATTEMPT = "0" * 32 + "/snapshots/services/s/segments/s-0/a1"


def verdicts(row: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    return {goal["name"]: (goal["value"], goal["is_met"]) for goal in row["goals"]}


@pytest.mark.parametrize(("value", "is_least", "is_met"), [(0.5, False, True), (0.6, False, False), (0.5, True, True)])
def test_what_is_just_as_wanted_is_met(value: float, is_least: bool, is_met: bool) -> None:
    assert Goal("ratio", value, 0.5, is_least).is_met is is_met
    assert not Goal("ratio", 0.4, 0.5, is_least=True).is_met


# --- a start ---


@pytest.mark.parametrize(("ranks", "parts"), [(1.5, (1.0, 0.5, 2.5)), (0.99, (1.0, 0.0, 3.0)), (4.01, (1.0, 3.0, 0.0))])
def test_parts_of_a_start_are_all_of_it(ranks: float, parts: tuple[float, ...]) -> None:
    """The start of the ranks is told in hundredths, and may seem to lie beside what it lies in."""
    found = restart.parts(1.0, ranks, 4.0, Answered(2.0, 2.5, 3.0, (7,), 10))
    assert tuple(found) == (*parts, 2.0, 0.5, 0.5)
    assert found.total_s == 7.0


def test_a_restart_is_held_against_an_empty_start_of_the_same_run() -> None:
    empty, again = (
        [Start(seconds, 0, 0, 0, 0, 0) for seconds in times] for times in ((5.0, 6.0, 9.0), (8.0, 7.0, 30.0))
    )
    kept = Kept(10.0, 4096, (1, 2))
    assert restart.goal(kept, empty, again) == Goal("restart_ratio", 0.2, 0.2)
    figures = restart.figures(kept, empty, again, 3)
    assert (figures["restart_s"], figures["restart_s_max"], figures["empty_start_s"]) == (8.0, 30.0, 6.0)
    assert (figures["restart_imports_s"], figures["equal_answers"]) == (8.0, 3)


def test_a_service_is_told_of_snapshots(tmp_path: Path) -> None:
    line = command(embedded_model(), tmp_path, world_size=3, snapshots="off", kv_bytes=1 << 20, port=77)
    told = {f"--data-dir={tmp_path}", "--world-size=3", "--kv-bytes=1048576", "--port=77", "--snapshots=off"}
    assert told < set(line)


# --- snapshots as files ---


def test_a_snapshot_is_there_with_its_manifest(tmp_path: Path) -> None:
    """Pieces alone count for nothing, and neither do snapshots from before."""
    folder, old, new = SnapshotFolder(tmp_path), tmp_path / ATTEMPT / "manifest", tmp_path / f"{ATTEMPT}b" / "manifest"
    for manifest in (old, new):
        manifest.parent.mkdir(parents=True)
    old.touch()
    (new.parent / "piece-00000.safetensors").write_bytes(b"1234")
    before = folder.manifests
    with pytest.raises(TimeoutError):
        folder.wait_new(before, timeout=0.02)
    timer = threading.Timer(0.01, new.write_bytes, [b"12"])
    timer.start()
    found = folder.wait_new(before, timeout=30)
    timer.join()
    assert (found.manifest, len(found.files), found.num_bytes) == (new, 2, 6)
    assert found.time == new.stat().st_mtime


def test_a_snapshot_is_gone_with_its_last_file(tmp_path: Path) -> None:
    folder, manifest = SnapshotFolder(tmp_path), tmp_path / ATTEMPT / "manifest"
    manifest.parent.mkdir(parents=True)
    with pytest.raises(TimeoutError):
        folder.wait_gone(manifest, timeout=0.02)
    manifest.parent.rmdir()
    folder.wait_gone(manifest, timeout=0)


def test_a_plain_copy_leaves_nothing(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_bytes(b"x" * 3000)
    assert plain_copy(files, tmp_path / "copy") > 0
    assert sorted(tmp_path.iterdir()) == files


def test_a_service_has_room_for_what_is_measured() -> None:
    assert token_bytes(embedded_model()) == 4 * 2 * 64 * 2 * 4
    assert 3 * kv_bytes(embedded_model(), 100_000, 3) >= 100_000 * 4096


# --- ratios ---


def test_saving_is_told_by_ratios_of_the_same_turn() -> None:
    """The second turn is twice as slow altogether, as on a machine with other work."""
    saved = [Saved(1.1, 0.6, 0.5, 100), Saved(2.2, 1.2, 1.0, 100)]
    row = saving.row(OPTIONS, [1.0, 2.0], saved, [Beside(100.0, 90.0, 1.5), Beside(50.0, 45.0, 3.0)])
    expected = {"acknowledged_ratio": (1.1, False), "saved_ratio": (1.2, True), "stream_ratio": (0.9, True)}
    expected |= {"stream_saved_ratio": (3.0, False)}
    assert verdicts(row) == expected
    assert (row["snapshot_bytes"], row["seal_copy_s"], row["stream_beside_tokens_per_s"]) == (100, 0.75, 67.5)


def test_without_snapshots_nothing_is_judged() -> None:
    assert saving.row(OPTIONS, [1.0, 2.0], [], [])["goals"] == []
    assert parked.row(OPTIONS, [], {"off": [parked.Turn(1.0, 1.0)]})["goals"] == []


def test_parked_contexts_are_held_against_those_that_are_read_again() -> None:
    turns = {
        mode: [parked.Turn(0.0, seconds) for seconds in times] for mode, times in (("off", (4, 6)), ("seal", (1, 2)))
    }
    assert verdicts(parked.row(OPTIONS, [], turns)) == {"parked_ratio": (0.3, False)}


def test_throughput_is_held_against_a_copy() -> None:
    figures, goals = storage.told("store", 8 << 20, [storage.Turn(4.0, 1.0, 2.0), storage.Turn(8.0, 2.0, 2.0)])
    assert figures == {
        "store_mib": 8.0,
        "store_save_mib_per_s": 1.3,
        "store_restore_mib_per_s": 5.3,
        "store_copy_mib_per_s": 4.0,
    }
    assert [(goal.value, goal.is_met) for goal in goals] == [(0.375, False), (1.5, True)]


def test_objects_are_saved_read_and_removed(tmp_path: Path) -> None:
    assert min(storage.objects(tmp_path / "store", 5000)) > 0
    assert not list((tmp_path / "store").rglob("objects*"))


def test_tokens_count_in_the_window_in_which_they_came() -> None:
    times = Times(iter([1.0, 2.0, 3.0]).__next__)
    for number in (1, 2, 4):
        times.note(number)
    assert [times.count(1.0, 2.0), times.count(2.0, 9.0), times.count(3.5, 9.0)] == [1, 6, 0]


# --- the journal and the catalog ---


def test_what_is_timed_is_what_a_service_writes_down(tmp_path: Path) -> None:
    assert len(journal.append_seconds(tmp_path, 3)) == 3
    kept = list(Journal(tmp_path).load())
    assert len(kept) == journal.GENERATIONS
    for one in kept:
        assert isinstance(one.said[0], Admitted)
        assert [said.index for said in one.said[1:] if isinstance(said, Tokens)] == [0, 1, 2]


async def test_commits_are_timed_without_the_first_ones(tmp_path: Path) -> None:
    seconds = await catalog.commits(tmp_path / "catalog.db", 10, 3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert await catalog.load(tmp_path / "catalog.db", catalog.WARM_UP + 3) > 0


# --- what is told ---


def test_new_rows_take_the_place_of_old_ones_in_the_order_of_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "durable.json"
    given = durable.parser_of("durable", "", durable.PARTS).parse_args(
        ["--json", "--into", str(file), "--only", "restart", "catalog"]
    )
    durable.run_parts("durable", durable.PARTS, given, lambda _: {"new": 0})
    given.only = ["journal", "restart"]
    durable.run_parts("durable", durable.PARTS, given, lambda _: {"new": 1})
    found = json.loads(file.read_text())
    assert capsys.readouterr().out.endswith(json.dumps(found, indent=2) + "\n")
    rows = [(row["part"], row["new"]) for row in found["rows"]]
    assert rows == [("restart", 1), ("journal", 1), ("catalog", 0)]


def test_parts_are_shown_to_people_and_on_the_page() -> None:
    options = replace(OPTIONS, tokens=1_000_000)
    found = result(options, {"append_us": 135.2}, [Goal("journal_share", 0.00694, 0.01)])
    row = {"part": "journal", **found, "machine": json.loads(report.file("overhead").read_text())["machine"]}
    text = table([row])
    assert "append_us                    135.2" in text and "1,000,000" in text
    assert text.endswith("journal_share                0.0069, wanted at most 0.01: met")
    page = report.page({"durable": {"rows": [row]}})
    assert "| journal | 1,000,000 | 2 | journal_share | 0.0069 | at most 0.01 | yes |" in page
    assert "| journal | repeats 2, append_us 135.2 |" in page


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--tokens", "0"], ["--world-size", "-1"]])
def test_bench_durable_refuses(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["durable", *arguments])
    with pytest.raises(SystemExit):
        durable.parse()
    assert "error" in capsys.readouterr().err
