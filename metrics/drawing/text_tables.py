"""Summaries as tables for people: one run, two runs side by side, many policies in one comparison."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metrics.measures.statistics import STATISTICS
from metrics.measures.summary_keys import ITERATION_TIME, LATENCIES, SUMMARY_KEYS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from metrics.measures.tenants import Tenants
    from metrics.pipelines.bubbles import Bubbles

Summary = Mapping[str, Any]

_COMPARED = (
    # heading, key, +1 if more is better, -1 if less is, 0 if neither; what is dropped first when room is short
    ("finished", "finished", 0, 5),
    ("TTFT p50", "ttft_s_p50", -1, 0),
    ("TTFT p99", "ttft_s_p99", -1, 0),
    ("TBT p50", "tbt_s_p50", -1, 4),
    ("TBT p99", "tbt_s_p99", -1, 0),
    ("TBT max", "tbt_s_max", -1, 7),
    ("stalls", "stalls", -1, 0),
    ("E2E p50", "e2e_s_p50", -1, 6),
    ("req/s", "requests_per_s", 1, 3),
    ("output tok/s", "output_tokens_per_s", 1, 0),
    ("goodput", "goodput_requests_per_s", 1, 0),
    ("SLO", "slo_attainment", 1, 2),
    ("pre-empted", "preemptions", -1, 8),
    ("dummy", "dummy_share", -1, 9),
    ("KV max", "kv_use_max", 0, 10),
    ("prefix hits", "cached_share", 1, 1),
)
_SHARES = (
    "_share",
    "_share_max",
    "_attainment",
    "token_budget_use",
    "kv_use_mean",
    "kv_use_max",
    "mfu",
    "mfu_busy",
    "mbu",
    "mbu_busy",
)


def terminal(width_in_pipes: int | None = 200, *, stderr: bool = False) -> Console:
    """Where commands print. What stands in brackets or between colons is text: names come from files and paths.

    width_in_pipes: characters a line into a pipe or file, where rich would assume 80 and cut tables.
    """
    from rich.console import Console

    shown = sys.stderr if stderr else sys.stdout
    width = None if shown.isatty() else width_in_pipes
    return Console(width=width, markup=False, emoji=False, highlight=False, stderr=stderr)


def comparison_table(
    summaries: Mapping[str, Summary], *, title: str | None = None, max_width: int | None = None, rivals: bool = True
) -> Table:
    """One row per run, the best value of each column in bold (rivals=False: nobody is best, as among SLO classes).

    A column that no run has a value for (prefix hits: none above 0) is left out; so are the least telling ones when the
    table would be wider than max_width (by default what rich takes for the width of the terminal).
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    max_width = max_width or Console().width
    labels = {
        label: label if summary.get("calibrated") is not False else f"{label} *" for label, summary in summaries.items()
    }
    columns = {
        heading.replace(" ", "\n").replace("-", "-\n"): (
            key,
            better,
            rank,
            _column_cells(key, list(summaries.values())),
        )
        for heading, key, better, rank in _COMPARED
        if any(_tells(key, summary) for summary in summaries.values())
    }

    def width() -> int:
        widths = [
            max(len(text) for text in (*heading.split("\n"), *cells)) for heading, (_, _, _, cells) in columns.items()
        ]
        return max(map(len, labels.values()), default=0) + sum(widths) + 3 * len(widths)

    while width() > max_width and any(rank for _, _, rank, _ in columns.values()):
        del columns[max(columns, key=lambda heading: columns[heading][2])]
    table = Table(
        title=title, title_justify="left", show_edge=False, pad_edge=False, box=_plain_box(), padding=(0, 2, 0, 0)
    )
    table.add_column("run", no_wrap=True)
    shown: list[list[Text]] = []
    for heading, (key, better, _, cells) in columns.items():
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
        values = [summary.get(key) for summary in summaries.values()]
        best = _best(values, better) if rivals else None
        if best is not None:
            bold = [_number(value) == best for value in values]
        else:
            bold = [False] * len(values)
        shown.append([Text(cell, style="bold" if strong else "") for cell, strong in zip(cells, bold)])
    for position, label in enumerate(labels.values()):
        table.add_row(Text(label), *(cells[position] for cells in shown))
    if any(summary.get("calibrated") is False for summary in summaries.values()):
        words = dict.fromkeys(str(one["cost_basis"]) for one in summaries.values() if one.get("calibrated") is False)
        table.caption = "* " + " | ".join(dict.fromkeys(one.partition(";")[0] for one in words))
        table.caption_justify = "left"
    return table


def summary_tables(summary: Summary) -> list[Table]:
    """Two tables of one summary: latencies with their statistics, and everything else with its meaning."""
    from rich.table import Table
    from rich.text import Text

    latencies = Table(box=_plain_box(), show_edge=False, pad_edge=False)
    latencies.add_column("latency")
    for statistic in STATISTICS:
        latencies.add_column(statistic, justify="right")
    families = [*LATENCIES, *ITERATION_TIME]
    for family in families:
        values = [format_value(f"{family}_{s}", summary.get(f"{family}_{s}")) for s in STATISTICS]
        latencies.add_row(family.removesuffix("_s"), *values)
    rest = Table(box=_plain_box(), show_edge=False, pad_edge=False)
    rest.add_column("key", no_wrap=True)
    rest.add_column("value", justify="right", no_wrap=True)
    rest.add_column("meaning", style="dim")
    shown = {f"{family}_{s}" for family in families for s in STATISTICS}
    for key, meaning in SUMMARY_KEYS.items():
        if key not in shown and not _is_missing(summary.get(key)):
            rest.add_row(key, Text(format_value(key, summary[key])), meaning)
    return [rest, latencies]


def differences(first: Summary, second: Summary) -> dict[str, dict[str, Any]]:
    """Per key: both values and (second - first) / first; None where that makes no sense."""
    found = {}
    for key in dict.fromkeys([*SUMMARY_KEYS, *first, *second]):
        a, b = first.get(key), second.get(key)
        if _is_missing(a) and _is_missing(b):
            continue
        x, y = _number(a), _number(b)
        relative = (y - x) / abs(x) if x is not None and y is not None and x else (0.0 if a == b else None)
        found[key] = {
            "first": None if _is_missing(a) else a,
            "second": None if _is_missing(b) else b,
            "relative": relative,
        }
    return found


def differences_table(labels: tuple[str, str], found: Mapping[str, Mapping[str, Any]]) -> Table:
    """`differences` as a table; what is equal is dim."""
    from rich.table import Table

    table = Table(box=_plain_box(), show_edge=False, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for label in labels:
        table.add_column(label, justify="right")
    table.add_column("difference", justify="right")
    for key, row in found.items():
        same = row["first"] == row["second"]
        relative = "" if row["relative"] is None or same else f"{row['relative']:+.2%}"
        values = [format_value(key, row["first"]), format_value(key, row["second"])]
        table.add_row(key, *values, relative, style="dim" if same else "")
    return table


def _tells(key: str, summary: Summary) -> bool:
    """Whether a run has something to say in a column: no hits are no news where nothing was to be hit."""
    value = _number(summary.get(key))
    return value is not None and (key != "cached_share" or value > 0)


def tenant_table(label: str, tenants: Tenants, bound: float | None, *, most: int = 40) -> Table:
    """What the tenants of one run asked for and were given; those that asked for most come first."""
    from rich.table import Table

    table = Table(title=label, title_justify="left", box=_plain_box(), show_edge=False, pad_edge=False)
    table.add_column("tenant")
    for heading in ("requests", "finished", "asked\ntokens", "served\ntokens", "share", "TTFT p50", "TTFT p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = tenants.table()
    for row in rows[:most]:
        table.add_row(
            row["tenant"],
            *(f"{row[name]:,.0f}" for name in ("requests", "finished", "asked_tokens", "served_tokens")),
            f"{row['share']:.1%}",
            *(format_value("x_s", row[name]) for name in ("ttft_s_p50", "ttft_s_p99")),
        )
    said = f" (VTC's bound: {bound:,.0f})" if bound is not None else ""
    others = f"{len(rows) - most} more tenants; " if len(rows) > most else ""
    table.caption = (
        f"{others}an output token counts {tenants.output_weight:g}; largest difference in service while two tenants "
        f"waited: {tenants.largest_gap():,.0f} tokens{said}; Jain's index {tenants.jain:.3f}"
    )
    table.caption_justify = "left"
    return table


def bubble_table(label: str, bubbles: Bubbles, per_request: Mapping[str, float]) -> Table:
    """Bubbles of one run: per stage and for all, the share of in-flight time that went to each cause."""
    from rich.table import Table

    from metrics.measures.bubble_causes import CAUSE_NAMES, CAUSES

    table = Table(title=label, title_justify="left", box=_plain_box(), show_edge=False, pad_edge=False)
    table.add_column("stage")
    for heading in ("in flight", "busy", "idle"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = [cause for c, cause in enumerate(CAUSES) if bubbles.idle_ns[:, c].any()]
    for cause in shown:
        table.add_column(CAUSE_NAMES[cause].replace(": ", "\n"), justify="right")
    for row in bubbles.rows():
        total = row["in_flight_s"]
        shares = [f"{row[f'{cause}_s'] / total:.2%}" if total else "-" for cause in shown]
        idle = f"{row['idle_s'] / total:.2%}" if total else "-"
        table.add_row(row["stage"], _duration(total), _duration(row["busy_s"]), idle, *shares)
    table.caption = (
        f"lost: {bubbles.lost_device_s:,.1f} device-seconds; bubble time per finished request: "
        + ", ".join(f"{name} {format_value('x_s', value)}" for name, value in per_request.items())
    )
    table.caption_justify = "left"
    return table


def rank_table(rows: Sequence[Mapping[str, Any]], *, most: int = 32) -> Table:
    """`metrics.measures.ranks.rank_rows` as a table; of more than `most` ranks those that wait least and most."""
    from rich.table import Table

    shown = list(rows)
    if len(shown) > most:
        by_waiting = sorted(shown, key=lambda row: row["waiting_share"])
        shown = [*by_waiting[: most // 2], *by_waiting[-(most // 2) :]]
    table = Table(title="by rank", title_justify="left", box=_plain_box(), show_edge=False, pad_edge=False)
    for heading in ("replica", "rank", "requests", "steps", "dummies", "tokens", "busy", "waits", "KV max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(
            *(f"{row[name]:,}" for name in ("replica", "rank", "requests", "steps", "dummy_steps", "tokens")),
            _duration(row["busy_s"]),
            f"{row['waiting_share']:.1%}",
            format_value("kv_use_max", row["kv_use_max"]),
        )
    if len(rows) > len(shown):
        table.caption = f"{len(rows) - len(shown)} more wait longer than the first and shorter than the last"
        table.caption_justify = "left"
    return table


def format_value(key: str, value: Any) -> str:
    """A value as people read it: seconds as µs, ms or s, shares as per cent, counts with thousands separated."""
    if _is_missing(value):
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith(_SHARES):
        return f"{value:.1%}"
    if _is_seconds(key):
        return _duration(float(value))
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _column_cells(key: str, summaries: list[Summary]) -> list[str]:
    cells = []
    for summary in summaries:
        text = format_value(key, summary.get(key))
        if key == "finished" and summary.get("requests") != summary.get("finished"):
            text = f"{text} of {format_value('requests', summary.get('requests'))}"
        cells.append(text)
    return cells


def _is_seconds(key: str) -> bool:
    return not key.endswith("_per_s") and ("_s_" in key or key.endswith("_s"))


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale or unit == "µs":
            scaled = seconds / scale
            break
    if not seconds:
        return "0 s"
    return f"{scaled:,.0f} {unit}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {unit}"


def _best(values: list[Any], better: int) -> float | None:
    numbers = [number for number in map(_number, values) if number is not None]
    if not better or len(numbers) < 2 or min(numbers) == max(numbers):
        return None
    return max(numbers) if better > 0 else min(numbers)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain_box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD
