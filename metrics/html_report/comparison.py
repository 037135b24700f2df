"""The table of runs. The best value of a column is marked in words too, and only among runs that can be compared.

A simulated run beside a live one, or an A100 beside an H100, are no rivals: what differs between them is not what was
decided. Runs are rivals if world, model, hardware, kind of costs and trace are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from html import escape
from typing import Any

from metrics.drawing.text_tables import format_value
from metrics.run_folder.tables import RunTables

COMPARED = (
    ("finished", "finished", 0),
    ("goodput_requests_per_s", "goodput (requests/s)", 1),
    ("slo_attainment", "SLO met", 1),
    ("ttft_s_p50", "TTFT P50", -1),
    ("ttft_s_p99", "TTFT P99", -1),
    ("tbt_s_p50", "TBT P50", -1),
    ("tbt_s_p99", "TBT P99", -1),
    ("tbt_s_max", "TBT max", -1),
    ("stalls", "stalls", -1),
    ("e2e_s_p50", "E2E P50", -1),
    ("requests_per_s", "requests/s", 1),
    ("output_tokens_per_s", "output tokens/s", 1),
    ("preemptions", "preemptions", -1),
    ("dummy_share", "dummy rows", -1),
    ("kv_use_max", "KV in use, most", 0),
    ("device_busy_share", "devices busy", 0),
)
"""Columns of the comparison: key of the summary, heading, whether more (1) or less (-1) is better."""

_KEPT = {"finished", "goodput_requests_per_s", "slo_attainment", "ttft_s_p50", "ttft_s_p99", "tbt_s_p99"}
"""Columns that stand in the table also where all runs have the same value."""


def comparison(runs: Mapping[str, RunTables]) -> str:
    """The table, with its caption."""
    summaries = {label: run.summary for label, run in runs.items()}
    known = [row for row in COMPARED if any(number_of(s.get(row[0])) is not None for s in summaries.values())]
    shown = [row for row in known if row[0] in _KEPT or len(runs) < 2 or len(_values(summaries, row[0])) > 1]
    left = [row for row in known if row not in shown]
    alike = [f"{heading} {format_value(key, _values(summaries, key)[0])}" for key, heading, _ in left]
    setting = {label: setting_of(run) for label, run in runs.items()}
    best = {
        (key, own): _best([number_of(summaries[label].get(key)) for label in runs if setting[label] == own], better)
        for key, _, better in shown
        for own in set(setting.values())
    }
    head = "".join(f'<th scope="col">{heading}</th>' for _, heading, _ in shown)
    lines = []
    for label, summary in summaries.items():
        cells = []
        for key, _, _ in shown:
            text = escape(format_value(key, summary.get(key)))
            if key == "finished" and summary.get("requests") != summary.get("finished"):
                text += f" of {format_value('requests', summary.get('requests'))}"
            value = number_of(summary.get(key))
            mark = value is not None and value == best[key, setting[label]]
            cells.append(f'<td class="best">{text} <small>best</small></td>' if mark else f"<td>{text}</td>")
        star = "" if summary.get("calibrated") is not False else " *"
        lines.append(f'<tr><th scope="row">{escape(label)}{star}</th>{"".join(cells)}</tr>')
    caption = f"All requests, latencies of those that finished.{_about_best(setting)}"
    if alike:
        caption += f" Alike in all runs: {escape(', '.join(alike))}."
    if any(summary.get("calibrated") is False for summary in summaries.values()):
        words = [str(one.get("cost_basis")) for one in summaries.values() if one.get("calibrated") is False]
        caption += f" * {escape(_bases(words))}."
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison of runs"><table class="runs">'
        f"<caption><span>{caption}</span></caption>"
        f'<thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _bases(words: Sequence[str]) -> str:
    """What the costs of runs rest on, each once; shares of measured time as the range that they span."""
    bases = list(dict.fromkeys(one.partition(";")[0] for one in words))
    shares = [int(found[1]) for base in bases if (found := re.fullmatch(r"partly measured: (\d+) %", base))]
    if len(shares) < 2:
        return " | ".join(bases)
    others = [base for base in bases if not base.startswith("partly measured: ")]
    return " | ".join([f"partly measured: {min(shares)} to {max(shares)} %", *others])


def _values(summaries: Mapping[str, Mapping[str, Any]], key: str) -> list[float | None]:
    """The different values of a column."""
    return list(dict.fromkeys(number_of(summary.get(key)) for summary in summaries.values()))


def setting_of(run: RunTables) -> Hashable:
    """What has to be the same before one run can be called better than another."""
    config = run.config
    pools = [pool for pool in config.get("pools") or () if isinstance(pool, Mapping)]
    gpus = tuple(sorted({str(pool.get("gpu")) for pool in pools} or {str(config.get("gpu"))}))
    cluster = config.get("cluster")
    devices = cluster.get("devices") if isinstance(cluster, Mapping) else None
    trace = config.get("trace")
    trace = trace if isinstance(trace, Mapping) else {}
    return (
        str(config.get("world")),
        str(config.get("model")),
        gpus,
        str(config.get("cost_kind")),
        str(devices or (config.get("tp") or 1) * (config.get("pp") or 1)),
        str(trace.get("name")),
        str(trace.get("requests")),
        str(trace.get("span_s")),
    )


def _about_best(setting: Mapping[str, Hashable]) -> str:
    """Between whom "best" is said, where that is not all of the runs."""
    groups = Counter(setting.values())
    if len(groups) <= 1:
        return ""
    rule = "of the same world (simulated or live), model, hardware, costs and trace"
    if max(groups.values()) < 2:
        return f" No run is called best: best is said among runs {rule}, and no two of these are."
    return f" Best is said only among runs {rule}."


def _best(values: Sequence[float | None], better: int) -> float | None:
    """The best value, if not most of the runs have it."""
    known = [value for value in values if value is not None]
    if not better or len(known) < 2:
        return None
    best = max(known) if better > 0 else min(known)
    return best if known.count(best) <= len(known) / 2 else None


def number_of(value: Any) -> float | None:
    """A number that can be compared, or None: no flags, no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return float(value)
