"""What was measured of many users at once, as lines of markdown: one section per measurement."""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
STREAMS = (("alone", "alone_ms"), ("beside an ingest", "beside_ms"))


def shared(found: Row) -> list[str]:
    """All together against one after another."""
    read = found["kv_bytes_per_step"]
    table = [[count, f"{size / 2**20:.2f}"] for count, size in read.items()]
    told = (
        f"{found['generations']} generations over one context of {found['context_tokens']:,} tokens on "
        f"{found['world_size']} ranks: together {found['service_tokens_per_s']} tokens/s, one after another "
        f"{found['baseline_tokens_per_s']}; **{found['ratio']} times** as many (wanted: {found['target']:g})."
    )
    return [told, "", *_table(["generations at once", "MiB of keys and values that rank 0 reads in a step"], table)]


def overhead(found: Row) -> list[str]:
    """The gap between steps."""
    table = [[r["batch"], r["us_per_step"], r["us_median"], r["step_us"], f"{r['share']:.1%}"] for r in found["rows"]]
    told = (
        f"From the end of a step on the rank that is last to the start of its next one, after "
        f"{found['context_tokens']:,} tokens on {found['world_size']} ranks (wanted: at most {found['target']:.0%})."
    )
    return [told, "", *_table(["streams", "us per step, mean", "median", "a step takes, us", "share"], table)]


def fair(found: Row) -> list[str]:
    """A stream with and without an ingest beside it."""
    names = ("p50", "p95", "p99", "max")
    table = [[who, *(found[key][name] for name in names)] for who, key in STREAMS]
    told = (
        f"Milliseconds between two tokens of a stream, alone and while {found['ingest']['tokens']:,} tokens are "
        f"ingested at {found['ingest']['tokens_per_s']:,} tokens/s, with `--target-itl-ms {found['target_itl_ms']:g}`."
    )
    return [told, "", *_table(["", *names], table)]


def scaling(rows: Sequence[Row]) -> list[str]:
    """Ranks against one."""
    heads = ["work", "ranks, tokens/s", "one rank, tokens/s", "ratio", "from - to", "wanted", "ceiling"]
    names = ("work", "service_tokens_per_s", "baseline_tokens_per_s", "ratio")
    table = [
        [*(r[name] for name in names), f"{r['ratio_min']} - {r['ratio_max']}", r["target"], r["ceiling"]] for r in rows
    ]
    first = rows[0]
    told = (
        f"{first['world_size']} ranks against one over {first['context_tokens']:,} tokens, a thread each, on a machine "
        f"of {first['physical_cores']} physical cores and {first['machine']['logical_cores']} logical ones. The "
        "ceiling is what as many processes gain here that compute the same and have nothing to say to each other."
    )
    return [told, "", *_table(heads, table)]


def serve(rows: Sequence[Row]) -> list[str]:
    """Load as it arrives."""
    names = ["rate", "requests", "completed", "refused", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99"]
    names += ["output_tokens_per_s", "goodput"]
    first = rows[0]
    told = (
        f"Open-loop arrivals over gRPC, questions to documents ({first['documents']}), {first['world_size']} ranks. "
        f"Good is a request whose first token came within {first['max_ttft_ms']:g} ms and the others every "
        f"{first['max_itl_ms']:g} ms."
    )
    return [told, "", *_table(names, [[row[name] for name in names] for row in rows])]


def prefill(rows: Sequence[Row]) -> list[str]:
    """Queries or keys."""
    names = ["transport", "chunk_tokens", "past_tokens", "way", "bytes_sent_per_rank", "seconds_median"]
    told = (
        f"Reading a chunk after a past on {rows[0]['world_size']} ranks of this machine's cores; `auto` is the choice "
        "by bytes ([why](../../docs/adr/0008-queries-or-keys-in-prefill.md))."
    )
    return [told, "", *_table(names, [[row[name] for name in names] for row in rows])]


def windows(rows: Sequence[Row]) -> list[str]:
    """Windowed layers on every rank or sharded."""
    heads = ["model", "work", "generations", "replicated, tokens/s", "sharded, tokens/s", "ratio", "from - to"]
    heads += ["room replicated", "room sharded"]
    names = ("model", "work", "generations", "service_tokens_per_s", "baseline_tokens_per_s", "ratio")
    table = [
        [
            *(row[name] for name in names),
            f"{row['ratio_min']} - {row['ratio_max']}",
            *(f"{row['max_tokens_held'][way]:,}" for way in ("replicated", "sharded")),
        ]
        for row in rows
    ]
    first = rows[0]
    told = (
        f"`--window-keys replicated` against `sharded` over {first['context_tokens']:,} tokens on "
        f"{first['world_size']} ranks of this machine's cores. Room is what {first['kv_bytes_per_rank'] / 2**20:,.0f} "
        "MiB per rank hold of long contexts, in tokens."
    )
    return [told, "", *_table(heads, table)]


def sampling(rows: Sequence[Row]) -> list[str]:
    """Rows together or one by one."""
    heads = ["sampling", "logits", "together, ms", "one by one, ms", "ratio", "from - to", "wanted", "same tokens"]
    table = [
        [
            *(row[name] for name in ("case", "logits", "together_ms", "alone_ms", "ratio")),
            f"{row['ratio_min']} - {row['ratio_max']}",
            row["target"] or "",
            "yes" if row["same_tokens"] else "no",
        ]
        for row in rows
    ]
    told = (
        f"Choosing the tokens of {rows[0]['rows']} rows from {rows[0]['vocabulary']:,} each, on one thread of rank 0, "
        "while all ranks wait: rows together against one after the other, which sorts whole rows for top-p."
    )
    return [told, "", *_table(heads, table)]


def key_types(rows: Sequence[Row]) -> list[str]:
    """Attention of a decode step over keys of each type."""
    heads = ["keys", "query heads", "time, ms", "against float32", "wanted", "differing on 8 ranks"]
    table = [
        [
            row["type"],
            row["heads"],
            f"{row['latency_us_median'] / 1e3:.2f}",
            f"{row['ratio']:.2f}",
            row["target"] or "",
            f"{row['differing']:.2%}",
        ]
        for row in rows
    ]
    first = rows[0]
    told = (
        f"Attention of one row over {first['keys']:,} keys, {first['kv_heads']} key heads of {first['head_dim']}, on "
        "one thread, all types by turns; and how many numbers of the answer, rounded to the type of the keys, tell "
        "whether they lay on one rank or on eight (of float32, and of 8 bits, which answer in float32, the last bits)."
    )
    return [told, "", *_table(heads, table)]


def bare(rows: Sequence[Row]) -> list[str]:
    """Documents that are facts alone."""
    table = [
        [
            row["kind"],
            f"{row['facts']:,}",
            f"{row['right'] / row['asked']:.0%} ({row['low']:.0%} - {row['high']:.0%}) of {row['asked']}",
            f"{row['ended'] / row['asked']:.0%}",
        ]
        for row in rows
    ]
    told = (
        "The embedded model over documents that are facts and nothing else, in the demo's wording, or lines "
        "`item-N = V`: right answers (95 % interval), and answers that ended by themselves."
    )
    return [told, "", *_table(["document", "facts", "right", "ended"], table)]


def hostile(rows: Sequence[Row]) -> list[str]:
    """Attacks beside one honest stream."""
    first = rows[0]
    more, most = first["targets"]["heartbeat_more_ms"], first["targets"]["remaining_mib"]
    told = (
        f"Each attack beside one honest stream and small honest requests, {first['world_size']} rank(s), against the "
        f"same without the attack; medians of {first['repeats']}, without -> with. Heartbeat is the longest time in "
        f"which nobody was served (wanted: at most {more:g} ms more), stream the longest time between two tokens, "
        "answer the longest wait for a small request. Memory is the coordinator's, in MiB: its peak during the attack, "
        f"and what remains a second after it (wanted: at most {most:g}). `burn` is no attack."
    )
    table = [
        [
            row["attack"],
            row["told"],
            *(_without_and_with(row, f"{name}_ms") for name in ("heartbeat", "stream", "answer")),
            *(f"{row['attacked'].get(name, float('nan')):,.0f}" for name in ("peak_mib", "remaining_mib")),
            ", ".join(f"{status}: {count:,}" for status, count in sorted(row["statuses"].items())),
            "; ".join(name for name, is_met in row["met"].items() if not is_met),
        ]
        for row in rows
    ]
    heads = [
        "attack",
        "what",
        "heartbeat, ms",
        "stream, ms",
        "answer, ms",
        "peak",
        "remaining",
        "calls ended",
        "missed",
    ]
    return [told, "", *_table(heads, table)]


def _without_and_with(row: Row, name: str) -> str:
    return " -> ".join(f"{row[kind].get(name, float('nan')):,.0f}" for kind in ("alone", "attacked"))


SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "shared": shared,
    "overhead": overhead,
    "fair": fair,
    "scaling": scaling,
    "serve": serve,
    "prefill": prefill,
    "windows": windows,
    "sampling": sampling,
    "key_types": key_types,
    "hostile": hostile,
    "bare": bare,
}


def _table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
