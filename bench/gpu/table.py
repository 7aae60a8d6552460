"""The rows of a run as a page for people, and beside them what the paper published."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.gpu.cases import Attend, Prefill
from bench.harness.paper import PAPER, PUBLISHED

Row = Mapping[str, Any]


def page(rows: Sequence[Row]) -> str:
    """Text in Markdown."""
    return "\n".join(lines(rows)) + "\n"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    machine = rows[0]["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    copied = f"{rows[0]['copy_gb_per_s']:,.0f} GB/s"
    yield f"On {machine['device']} ({machine['multiprocessors']} multiprocessors), {versions}, {machine['date']}."
    clocks = ", ".join(f"{name} {value}" for name, value in machine["nvidia_smi"].items()) or "unknown"
    yield f"A copy on the device moves {copied}; shares are shares of that. Clocks: {clocks}."
    measured = [row for row in rows if "left_out" not in row and "failed" not in row]
    yield from table(measured, KERNELS, lambda row: row["case"] not in OWN_TABLES, kernel_cells)
    yield from table(measured, PREFILL, lambda row: row["case"] == "prefill", prefill_cells)
    yield from table(measured, STEPS, lambda row: row["case"] == "step", step_cells)
    yield from steps_told(measured)
    yield from table(measured, CHOOSING, lambda row: row["case"] == "choose", choice_cells)
    yield from table(measured, SHARING, lambda row: row["case"] == "share", sharing_cells)
    yield from not_measured(rows)
    yield from on_other_dates(measured, machine["date"])
    yield from published()


OWN_TABLES = ("prefill", "step", "choose", "share")
KERNELS = ("what", "kernels", "in a graph, us", "as called, us", "GB/s", "share", "target")
PREFILL = ("prefill, one layer", "kernels", "tokens/s", "TFLOP/s", "target", "first call, ms")
STEPS = (
    "decode step, random Llama-3.1-8B",
    "kernels",
    "captured, ms",
    "eager, ms",
    "the host, ms",
    "launches + graphs",
    "waits",
    "GB",
    "share",
    "target",
    "transformers, ms",
)
CHOOSING = ("what", "in a graph, us", "as called, us", "until the host has them, us", "launches", "copies", "waits")
SHARING = ("what", "kernels", "transport", "tokens/s", "one rank, tokens/s", "same tokens")
PAPERS = ("the paper", "context", "tree, s for 10 tokens", "ring, s for 10 tokens")


def table(
    rows: Sequence[Row], head: Sequence[str], is_wanted: Callable[[Row], bool], told: Callable[[Row], Sequence[str]]
) -> Iterator[str]:
    """A table of some rows; nothing where there are none."""
    wanted = [row for row in rows if is_wanted(row)]
    if wanted:
        yield ""
        yield cells(*head)
        yield cells(*["---"] * len(head))
    for row in wanted:
        yield cells(*told(row))


def cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def kernel_cells(row: Row) -> Sequence[str]:
    numbers = f"{row['graph_us']:,.1f}", f"{row['called_us']:,.1f}", f"{row['gb_per_s']:,.0f}"
    case, share = case_of(row), f"{row['share']:.0%}"
    if case and case.target_tflops:
        share += f", {tflops(row, case):.0f} TFLOP/s"
    return row["what"], row["kernels"], *numbers, share, target(row)


def prefill_cells(row: Row) -> Sequence[str]:
    first = f"{row['first_ms']:,.0f}" if "first_ms" in row else ""
    return row["what"], row["kernels"], f"{row['tokens_per_s']:,.0f}", f"{row['tflops']:,.0f}", target(row), first


def step_cells(row: Row) -> Sequence[str]:
    """Of pairs the first is captured, the second eager."""
    pair = row["captured_counts"], row["eager_counts"]
    launches = (f"{counts['launches']} + {counts['graphs']}" if counts else "unknown" for counts in pair)
    waits = (f"{counts['waits']}" if counts else "unknown" for counts in pair)
    return (
        row["what"],
        row["kernels"],
        f"{row['captured_ms']:.2f}" + ("" if row["is_captured"] else ", not captured"),
        f"{row['eager_ms']:.2f}",
        f"{row['captured_host_ms']:.2f} / {row['eager_host_ms']:.2f}",
        " / ".join(launches),
        " / ".join(waits),
        f"{(row['weight_bytes'] + row['key_bytes']) / 1e9:.1f}",
        f"{row['share']:.0%}",
        target(row),
        f"{row['transformers']['ms']:.2f}" if "ms" in row["transformers"] else "",
    )


def steps_told(rows: Sequence[Row]) -> Iterator[str]:
    """Why steps were not captured; by which attention and cache transformers is fastest, and what the others took."""
    cells: list[str] = []
    for row in rows:
        if row["case"] == "step" and not row["is_captured"]:
            cells.append(f"- {row['what']}: not captured: {row['why_eager']}")
        if row["case"] == "step" and "reason" not in (theirs := row["transformers"]):
            others = ", ".join(f"{name}: {took}" for name, took in theirs["others"].items())
            cells.append(f"- {row['what']}: transformers is fastest by {theirs['way']} (ms: {others})")
        elif row["case"] == "step":
            cells.append(f"- {row['what']}: nothing of transformers: {row['transformers']['reason']}")
    yield from ["", *cells] if cells else ()


def choice_cells(row: Row) -> Sequence[str]:
    counts = row["counts"]
    cells = (f"{counts[name]}" if counts else "unknown" for name in ("launches", "copies", "waits"))
    times = (f"{row[name]:,.0f}" for name in ("captured_us", "called_us", "to_the_host_us"))
    return row["what"], *times, *cells


def sharing_cells(row: Row) -> Sequence[str]:
    rates = f"{row['tokens_per_s']:,.0f}", f"{row['alone_tokens_per_s']:,.0f}"
    return row["what"], row["kernels"], row["transport"], *rates, "yes" if row["is_same"] else "NO"


def target(row: Row) -> str:
    """The share, or the rate of products that takes its place, and whether it was reached."""
    case = case_of(row)
    if case and case.target_tflops:
        return f"{case.target_tflops:.0f} TFLOP/s, {'met' if tflops(row, case) >= case.target_tflops else 'missed'}"
    share = row.get("target") or (case.target if isinstance(case, Attend) else None)
    return f"{share:.0%}, {'met' if row['share'] >= share else 'missed'}" if share else ""


def tflops(row: Row, case: Attend | Prefill) -> float:
    """Rate of the required products, in 10^12 FLOP/s."""
    return case.num_flops / row["graph_us"] / 1e6


def case_of(row: Row) -> Attend | Prefill | None:
    """The case of a row whose products are counted, with the targets of today."""
    if row["case"] == "attend":
        return Attend(row["keys"], row["num_keys"], row["num_rows"], row["is_shared"])
    return Prefill(row["past"], row["num_rows"]) if row["case"] == "prefill" else None


def not_measured(rows: Sequence[Row]) -> Iterator[str]:
    reasons = [(row["what"], why, row[why]) for row in rows for why in ("left_out", "failed") if why in row]
    if reasons:
        yield ""
    for subject, outcome, reason in reasons:
        yield f"- {outcome.replace('_', ' ').capitalize()}: {subject}: {reason}"


def on_other_dates(rows: Sequence[Row], date: str) -> Iterator[str]:
    """The cases that were not measured on the date of the page, by date."""
    dates = sorted({row["machine"]["date"] for row in rows} - {date})
    for other in dates:
        cases = dict.fromkeys(row["what"] for row in rows if row["machine"]["date"] == other)
        yield ""
        yield f"Measured on {other}, with the code of that date: {'; '.join(cases)}."


def published() -> Iterator[str]:
    """What the paper has, on its own machines."""
    yield ""
    yield f"Published, not measured here ({PAPER}): whole models on several GPUs, in bfloat16."
    yield ""
    yield cells(*PAPERS)
    yield cells(*["---"] * len(PAPERS))
    for each in PUBLISHED:
        for row in each.rows:
            what = f"{each.table}: {each.model} on {each.hardware}"
            yield cells(what, f"{row.context_tokens:,}", f"{row.tree_s:.2f}", f"{row.ring_s:.2f}")
