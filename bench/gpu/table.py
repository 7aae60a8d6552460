"""The rows of a run as a page for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def page(rows: Sequence[Row]) -> str:
    """Text in Markdown."""
    return "\n".join(lines(rows)) + "\n"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    machine = rows[0]["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    copied = f"{rows[0]['copy_gb_per_s']:,.0f} GB/s"
    yield f"On {machine['device']} ({machine['multiprocessors']} multiprocessors), {versions}, {machine['date']}."
    clocks = machine["nvidia_smi"] or "not told"
    yield f"A copy on the device moves {copied}; shares are shares of that. Clocks: {clocks}."
    yield ""
    yield "| what | kernels | in a graph, us | as called, us | GB/s | share | target |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row["case"] != "prefill":
            yield cells(
                row["what"],
                row["kernels"],
                f"{row['graph_us']:,.1f}",
                f"{row['called_us']:,.1f}",
                f"{row['gb_per_s']:,.0f}",
                f"{row['share']:.0%}",
                target(row),
            )
    yield ""
    yield "| prefill, one layer | kernels | tokens/s | TFLOP/s |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        if row["case"] == "prefill":
            yield cells(row["what"], row["kernels"], f"{row['tokens_per_s']:,.0f}", f"{row['tflops']:,.0f}")


def cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def target(row: Row) -> str:
    if row["target"] is None:
        return ""
    return f"{row['target']:.0%}, {'met' if row['share'] >= row['target'] else 'missed'}"
